"""The loop that docs/context.md shows, as it stands there, on a sequence of its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headrace.mask_layouts import TEXT, VISION, packed
from tests.verify.context_models import Descent

PAGE = Path(__file__).parents[4] / "docs" / "context.md"


def trained(group: dist.ProcessGroup) -> list[float]:
    """The losses of three steps."""
    [source] = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "def train_step" in block]
    page: dict[str, Any] = {}
    exec(compile(source, str(PAGE), "exec"), page)
    mask = packed([[(TEXT, 200), (VISION, 150), (TEXT, 100)], [(VISION, 64), (TEXT, 90)]], padding=20)
    torch.manual_seed(0)
    model = page["Model"](vocabulary=32, places=mask.num_tokens, width=16, num_layers=2)
    optimizer = Descent(model.parameters(), 0.5)
    ids = torch.randint(32, (mask.num_tokens,))
    labels = ids.roll(-1).masked_fill(torch.arange(mask.num_tokens) % 3 == 0, -100)
    return [page["train_step"](model, optimizer, mask, ids, labels, group) for _ in range(3)]
