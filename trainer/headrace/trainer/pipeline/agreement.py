"""Before the first step: whether the processes of a pipeline were started alike, and replicas begin with equal weights."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.errors import UserError
from headrace.observability.logs import pairs

log = logging.getLogger(__name__)

_PRIME = 1_000_003
_BITS = {2: torch.int16, 4: torch.int32}


def check_alike(settings: Mapping[str, Any], group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise UserError, on all processes of the group, where these settings are not the same everywhere."""
    text = json.dumps(dict(settings), sort_keys=True).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), signed=True)
    others = _different(digest, group, device)
    if others:
        raise UserError(
            f"processes {_named(others)} were started otherwise than process 0: give all of them the same "
            f"{', '.join(settings)}, and wait until all hosts see the same files"
        )


def check_replicas(parameters: Iterable[Tensor], group: dist.ProcessGroup | None, stage: str, device: torch.device) -> None:
    """Raise UserError, on all replicas of a stage, where they do not have equal weights. None: there is one replica only."""
    others = [] if group is None else _different(fingerprint(parameters), group, device)
    if others:
        raise UserError(
            f"replicas {_named(others)} of {stage} begin with other weights than replica 0, and would never learn the same: "
            "give all hosts the same files of the model and of the checkpoint"
        )


def fingerprint(parameters: Iterable[Tensor]) -> int:
    """63 bits that are the same for equal values, and with other values hardly ever."""
    total = 0
    for parameter in parameters:
        bits = parameter.detach().flatten().view(_BITS[parameter.element_size()])
        total = (total * _PRIME + int(bits.sum(dtype=torch.int64))) % 2**63
    return total


class FrozenFlags(Protocol):
    """What of a unit keeps its weights."""

    @property
    def frozen(self) -> bool: ...
    @property
    def frozen_projector(self) -> bool: ...


def way_of_training(model: str, dtype: torch.dtype, units: Mapping[str, FrozenFlags]) -> dict[str, Any]:
    """What a checkpoint says of how its weights were trained, as JSON has it."""
    frozen = {unit: [flags.frozen, flags.frozen_projector] for unit, flags in units.items()}
    return {"model": model, "products": str(dtype).removeprefix("torch."), "frozen unit and projector": frozen}


def tell_differences(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Warn where training goes on otherwise than when its checkpoint was saved. saved: empty where that does not say it."""
    for name, value in present.items():
        if name in saved and saved[name] != value:
            log.warning("goes on otherwise than saved %s", pairs(what=name, saved=json.dumps(saved[name]), now=json.dumps(value)))


def _different(number: int, group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """The ranks of the group that have another number than its first."""
    own = torch.tensor([number], dtype=torch.int64, device=device)
    everybody = [torch.empty_like(own) for _ in range(group.size())]
    group.allgather([everybody], [own]).wait()
    numbers = torch.cat(everybody).tolist()
    return [rank for rank, other in enumerate(numbers) if other != numbers[0]]


def _named(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
