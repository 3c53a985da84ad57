"""Checks before the first step that all processes of a pipeline were started alike, and as their checkpoint was trained."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from headrace.errors import UserError
from headrace.observability.logs import pairs
from headrace.trainer.replica_check import few

log = logging.getLogger(__name__)


def check_alike(settings: Mapping[str, Any], group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise UserError on all processes of the group if their settings differ. `settings`: JSON values by option name."""
    text = json.dumps(dict(settings), sort_keys=True).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), signed=True)
    others = _different(digest, group, device)
    if others:
        raise UserError(
            f"processes {few(others)} were started otherwise than process 0: give all of them the same "
            f"{', '.join(settings)}, and wait until all hosts see the same files"
        )


class FrozenFlags(Protocol):
    """Protocol of a unit's settings: whether its layers and its projector keep their weights."""

    @property
    def frozen(self) -> bool: ...
    @property
    def frozen_projector(self) -> bool: ...


def training_record(
    model: str, dtype: torch.dtype, units: Mapping[str, FrozenFlags], frozen_layers: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Return the record, in JSON values, that a checkpoint keeps of how its weights are trained: model, dtype, what is frozen.

    frozen_layers: number of frozen first layers by unit; 0 if not named.
    """
    return {
        "model": model,
        "products": str(dtype).removeprefix("torch."),
        "frozen unit and projector": {unit: [flags.frozen, flags.frozen_projector] for unit, flags in units.items()},
        "frozen first layers": {unit: (frozen_layers or {}).get(unit, 0) for unit in units},
    }


def warn_differences(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Log a warning for each entry of `training_record` that differs between a checkpoint and the run that resumes it.

    `saved`: the checkpoint's record, empty if it has none. `present`: that of this run.
    """
    for name, value in present.items():
        if name in saved and saved[name] != value:
            log.warning("goes on otherwise than saved %s", pairs(what=name, saved=json.dumps(saved[name]), now=json.dumps(value)))


def _different(number: int, group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Return the ranks of the group whose number differs from that of its rank 0. A collective call."""
    own = torch.tensor([number], dtype=torch.int64, device=device)
    everybody = [torch.empty_like(own) for _ in range(group.size())]
    group.allgather([everybody], [own]).wait()
    numbers = torch.cat(everybody).tolist()
    return [rank for rank, other in enumerate(numbers) if other != numbers[0]]
