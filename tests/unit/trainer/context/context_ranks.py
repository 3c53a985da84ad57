"""Four processes with gloo groups of one to four of them, which go through all cases of context parallelism."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.unit.trainer.context import attention_cases, context_example, model_cases

RANKS = 4
TIMEOUT_S = 100.0  # of a wait for each other

Run = list[dict[str, Any]]
"""What each rank computed, by case."""


def run(folder: Path, *, wide: bool) -> Run:
    """wide: all combinations, in place of some of each kind."""
    mp.start_processes(_compute, args=(folder, wide), nprocs=RANKS, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


def _compute(rank: int, folder: Path, wide: bool) -> None:
    torch.set_num_threads(1)
    store, timeout = f"file://{folder / 'store'}", timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timeout)
    groups = {cp: dist.new_group(list(range(cp)), timeout=timeout) for cp in range(1, RANKS + 1)}
    pairs = [dist.new_group([2 * pair, 2 * pair + 1], timeout=timeout) for pair in range(RANKS // 2)]
    answer: dict[str, Any] = {}
    for case in attention_cases.ALL if wide else attention_cases.FEW:
        if rank < case.cp:
            answer[str(case)] = attention_cases.computed(case, groups[case.cp], rank)
    for name, of_model in (model_cases.WIDE if wide else model_cases.CASES).items():
        if rank < of_model.cp:
            answer[name] = model_cases.computed(of_model, groups[of_model.cp], rank)
    if not wide:
        answer["step"] = model_cases.one_step([model_cases.STEP[rank // 2]], pairs[rank // 2])
        answer |= {f"example on {cp}": context_example.trained(groups[cp]) for cp in (1, 3) if rank < cp}
    torch.save(answer, folder / f"{rank}.pt")
    dist.destroy_process_group()
