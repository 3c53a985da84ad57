"""Processes that share sequences, which run one case after the other."""

from __future__ import annotations

import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.verify import context_attention, context_models
from tests.verify.context_models import ModelCase
from tests.verify.processes import Processes

MOST_RANKS = 4
ContextCase = context_attention.Case | ModelCase


def context_processes() -> Processes:
    return Processes(MOST_RANKS, serve)


def serve(rank: int, count: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}-context", rank=rank, world_size=count)
    groups = {cp: dist.new_group(list(range(cp))) for cp in range(1, count + 1)}
    while True:
        number, case = pipe.recv()
        try:
            pipe.send((number, _run(rank, case, groups[case.cp]) if rank < case.cp else []))
        except Exception:
            pipe.send((number, traceback.format_exc()))


def _run(rank: int, case: ContextCase, group: dist.ProcessGroup) -> list[Any]:
    """What a rank of the group computes of the case, in NumPy's arrays: torch would send tensors as files of its own."""
    if isinstance(case, ModelCase):
        loss_sum, weight, gradients = context_models.computed(case, group, rank)
        return [(loss_sum, weight, {name: gradient.numpy() for name, gradient in gradients.items()})]
    return [[x.float().numpy() for x in context_attention.computed(case, group, rank)]]
