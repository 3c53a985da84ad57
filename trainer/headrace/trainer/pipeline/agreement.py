"""Checks that processes agree: all of a pipeline were started alike, and replicas begin, and go on, with equal weights."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.errors import HeadraceError, UserError
from headrace.observability.logs import pairs

log = logging.getLogger(__name__)

_BITS = {2: torch.int16, 4: torch.int32}


def check_alike(settings: Mapping[str, Any], group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise UserError on all processes of the group if their settings differ. `settings`: JSON values by option name."""
    text = json.dumps(dict(settings), sort_keys=True).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), signed=True)
    others = _different(digest, group, device)
    if others:
        raise UserError(
            f"processes {_named(others)} were started otherwise than process 0: give all of them the same "
            f"{', '.join(settings)}, and wait until all hosts see the same files"
        )


def check_replicas(
    named: Iterable[tuple[str, Tensor]],
    group: dist.ProcessGroup | None,
    of: str,
    device: torch.device,
    *,
    step: int | None = None,
) -> None:
    """Raise an error on all replicas if their weights differ, which names the replicas and the first weight. A collective call.

    named: the weights by name, of which each replica sends a digest of 8 bytes. group: the data-parallel group, None if there is
    one replica. of: what the replicas are of, for the message. step: the one that they have just trained; None: before the first,
    where other weights are the user's to mend (UserError), and not a HeadraceError.
    """
    if group is None or group.size() == 1:
        return
    names, weights = zip(*named, strict=True)
    own = digests(weights).to(device)
    everybody = [torch.empty_like(own) for _ in range(group.size())]
    group.allgather([everybody], [own]).wait()
    differing = torch.stack(everybody).cpu() != everybody[0].cpu()
    others = differing.any(dim=1).nonzero().flatten().tolist()
    if not others:
        return
    first = names[int(differing.any(dim=0).nonzero()[0])]
    if step is None:
        raise UserError(
            f"replicas {_named(others)} of {of} begin with other weights than replica 0, first in {first}, and would never learn "
            "the same: give all hosts the same files of the model and of the checkpoint"
        )
    raise HeadraceError(
        f"after step {step} replicas {_named(others)} of {of} have other weights than replica 0, first in {first}: they no "
        "longer train one model; go on from a checkpoint (--resume), without the hosts whose memory or device may be faulty"
    )


def digests(weights: Iterable[Tensor]) -> Tensor:
    """Return a digest of each weight's bits, (n,) int64 on their device: equal for equal values, hardly ever for others.

    It is a sum, which costs one reading of the weights, and for which the host does not wait.
    """
    flat = (weight.detach().flatten() for weight in weights)
    return torch.stack([bits.view(_BITS[bits.element_size()]).sum(dtype=torch.int64) for bits in flat])


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


def _named(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
