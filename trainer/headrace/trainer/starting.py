"""What every training loop needs at its start: its rank, its process group, and a check that fresh weights fit the job."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from headrace.errors import UserError
from headrace.launcher_variables import num_ranks as num_ranks
from headrace.launcher_variables import rank as rank
from headrace.observability.logs import pairs
from headrace.trainer.communicators import abort_communicators
from headrace.trainer.devices import check_backend, check_device, check_shared_gpus
from headrace.trainer.hang_detection import HANG_TIMEOUT_S, Patience
from headrace.trainer.loading.session import MISSING_TIMEOUT_S
from headrace.trainer.rank_watch import RankWatch

log = logging.getLogger(__name__)

GROUP_TIMEOUT = timedelta(seconds=2 * MISSING_TIMEOUT_S)
"""Timeout of collectives: longer than ranks wait for data or for each other's commits, as the watch ends a job that hangs."""
_ABORT_S = 4.0
"""How long a single rank waits for the abort of its communicators."""


def check_fresh(job: str, step: int, *, allowed: bool) -> None:
    """Check that weights which do not come from a checkpoint may train from `step` on, the job's first uncommitted step.

    If the job has committed steps already, these weights have not seen them: raises UserError or, if `allowed`, logs a warning.
    """
    if not step:
        return
    if not allowed:
        raise UserError(
            f"job {job!r} has committed {step} step(s), which fresh weights have not seen: go on from a checkpoint (--resume DIR "
            f"with a pipeline or --nodes), train it anew after `headrace job reset {job} --step 0`, or take --fresh-weights"
        )
    log.warning("weights are fresh, and the job goes on %s", pairs(job=job, from_step=step))


@contextmanager
def watched(hang_timeout_s: float = HANG_TIMEOUT_S) -> Iterator[RankWatch | None]:
    """Watch over all of torchrun's ranks, which end together from here on (`RankWatch`); None for a single rank."""
    if num_ranks() == 1:
        yield None
        return
    with RankWatch(rank(), num_ranks(), Patience(hang_timeout_s)) as watch:
        yield watch


@contextmanager
def process_group(device: torch.device, watch: RankWatch | None, *, alone: bool = False) -> Iterator[None]:
    """Hold torch's default process group of all of torchrun's ranks, once all have joined; a single rank gets one if `alone`.

    Raises UserError on GPUs if this rank's is not there, torch lacks NCCL, or two ranks have the same one.

    The backend is torch's default for the device: NCCL for GPUs, gloo for CPUs. `watch`: the result of `watched`, which aborts
    the communicators on an error (`abort_communicators`), as their waits would not end; without it, that is done here.
    """
    check_device(device)
    if watch is None and not alone:
        yield
        return
    check_backend(device.type, has_nccl=dist.is_nccl_available())
    store = dist.HashStore() if watch is None else watch.channel.store()  # type: ignore[attr-defined]
    if device.type == "cuda":
        torch.cuda.set_device(device)
        keys = [f"gpu {number}" for number in range(num_ranks())]
        store.set(keys[rank()], str(torch.cuda.get_device_properties(device).uuid))
        check_shared_gpus({number: gpu.decode() for number, gpu in enumerate(store.multi_get(keys))})
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, store=store, rank=rank(), world_size=num_ranks(), timeout=GROUP_TIMEOUT)
    try:
        yield
    except BaseException:
        if watch is None:  # else it tells the other ranks first
            abort_communicators().join(_ABORT_S)
        raise
    dist.destroy_process_group()
