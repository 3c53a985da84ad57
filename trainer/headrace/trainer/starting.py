"""What every training loop needs at its start: its rank, its process group, and a check that fresh weights fit the job."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from headrace.errors import HeadraceError, UserError
from headrace.observability.logs import pairs

log = logging.getLogger(__name__)


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


def rank() -> int:
    """Return this process's rank as set by torchrun; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def num_ranks() -> int:
    """Return the number of ranks as set by torchrun; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Hold torch's default process group of all of torchrun's ranks, once all have joined; a single rank gets no group.

    When one rank fails, the others would only see its connections end: they raise HeadraceError with that rank's message.
    """
    if num_ranks() == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, _, _ = next(rendezvous("env://"))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank(), world_size=num_ranks())
    try:
        with _first_failure_on_all_ranks(store):
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _first_failure_on_all_ranks(store: Store) -> Iterator[None]:
    """Have every rank raise the message of the rank that failed first, except those that raise a HeadraceError of their own."""
    try:
        yield
    except Exception as err:
        words = f"rank {rank()}: {err if isinstance(err, HeadraceError) else repr(err)}"
        try:
            first = store.compare_set("failure", "", words).decode()
        except dist.DistError:  # rank 0 hosted the store and has ended
            first = "rank 0 has ended: its log says why"
        if isinstance(err, HeadraceError) or first == words:
            raise
        raise HeadraceError(first) from err
