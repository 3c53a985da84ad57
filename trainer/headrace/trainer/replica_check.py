"""Comparison of the weights of replicas, which must be equal before the first step and behind every one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.errors import HeadraceError, UserError

_BITS = {2: torch.int16, 4: torch.int32}


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
    raise difference(f"replicas {few(others)} of {of}", "replica 0", first, step)


def difference(those: str, one: str, first: str, step: int | None) -> HeadraceError:
    """Return the error that `those` replicas have other weights than `one`, first in the weight `first`.

    step: as in `check_replicas`.
    """
    if step is None:
        return UserError(
            f"{those} begin with other weights than {one}, first in {first}, and would never learn the same: "
            "give all hosts the same files of the model and of the checkpoint"
        )
    return HeadraceError(
        f"after step {step} {those} have other weights than {one}, first in {first}: they no longer train one model; "
        "go on from a checkpoint (--resume), without the hosts whose memory or device may be faulty"
    )


def digests(weights: Iterable[Tensor]) -> Tensor:
    """Return a digest of each weight's bits, (n,) int64 on their device: equal for equal values, hardly ever for others.

    It is a sum, which costs one reading of the weights, and for which the host does not wait.
    """
    flat = (weight.detach().flatten() for weight in weights)
    return torch.stack([bits.view(_BITS[bits.element_size()]).sum(dtype=torch.int64) for bits in flat])


def few(names: Sequence[object]) -> str:
    """Return the first of these names or numbers in words, and how many there are beside them."""
    return ", ".join(map(str, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
