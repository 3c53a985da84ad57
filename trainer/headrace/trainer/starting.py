"""What every way of training does first: which rank it is, its process group, and whether fresh weights fit the job."""

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
    """Before the first step that weights without a checkpoint take. Raises UserError where others have come before it."""
    if not step:
        return
    if not allowed:
        raise UserError(
            f"job {job!r} has committed {step} step(s), which fresh weights have not seen: go on from a checkpoint (--resume DIR "
            f"with --topology or --nodes), train it anew after `headrace job reset {job} --step 0`, or take --fresh-weights"
        )
    log.warning("weights are fresh, and the job goes on %s", pairs(job=job, from_step=step))


def rank() -> int:
    """As torchrun says; 0 without it."""
    return int(os.environ.get("RANK", "0"))


def num_ranks() -> int:
    """As torchrun says; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """The group of all of torchrun's ranks, once they are there; none without it.

    Where one rank fails, the others see no more than its connections end: they raise HeadraceError with what it said.
    """
    if num_ranks() == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, _, _ = next(rendezvous("env://"))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank(), world_size=num_ranks())
    try:
        with _the_first_words(store):
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _the_first_words(store: Store) -> Iterator[None]:
    """What fails first is what all ranks say, but for those that have a sentence of their own."""
    try:
        yield
    except Exception as err:
        words = f"rank {rank()}: {err if isinstance(err, HeadraceError) else repr(err)}"
        try:
            first = store.compare_set("failure", "", words).decode()
        except dist.DistError:  # the store was rank 0's, and went with it
            first = "rank 0 has ended: its log says why"
        if isinstance(err, HeadraceError) or first == words:
            raise
        raise HeadraceError(first) from err
