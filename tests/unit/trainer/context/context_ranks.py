"""Four processes that train as the pages say, on sequences that several of them share."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.unit.trainer.context import context_example
from tests.verify.context_models import STEP, one_step

RANKS = 4
TIMEOUT_S = 100.0  # of a wait for each other

Run = list[dict[str, Any]]
"""What each rank computed, by name."""


def run(folder: Path) -> Run:
    mp.start_processes(_compute, args=(folder,), nprocs=RANKS, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


def _compute(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store, timeout = f"file://{folder / 'store'}", timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timeout)
    groups = {cp: dist.new_group(list(range(cp)), timeout=timeout) for cp in (1, 3)}
    pairs = [dist.new_group([2 * pair, 2 * pair + 1], timeout=timeout) for pair in range(RANKS // 2)]
    answer: dict[str, Any] = {"step": one_step([STEP[rank // 2]], pairs[rank // 2])}
    answer |= {f"example on {cp}": context_example.trained(group) for cp, group in groups.items() if rank < cp}
    torch.save(answer, folder / f"{rank}.pt")
    dist.destroy_process_group()
