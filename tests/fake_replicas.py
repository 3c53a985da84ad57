"""One replica of several, the others of which are torch's fake, and the collectives that it begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

_PASSES = {"reduce_scatter_single": 1, "all_gather_single": 1, "all_reduce": 2}
"""How often a ring of replicas passes its tensor on, all but one's share each time."""


@contextmanager
def fake_replicas(count: int) -> Iterator[list[tuple[str, int]]]:
    """Yield collectives as they are begun, each with the bytes that a ring of replicas has each of them send."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=count)
    begun: list[tuple[str, int]] = []

    def recording(name: str, passes: int) -> Any:
        collective = getattr(dist, name)

        def begin(*tensors: Any, **options: Any) -> Any:
            whole = max(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
            begun.append((name, passes * whole * (count - 1) // count))
            return collective(*tensors, **options)

        return begin

    try:
        with patch.multiple(dist, **{name: recording(name, passes) for name, passes in _PASSES.items()}):
            yield begun
    finally:
        dist.destroy_process_group()
