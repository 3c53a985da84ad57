"""Attention of each rank of context parallelism on this machine's processor, one rank after the other, beside one rank alone."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from benchmarks.context.random_masks import multimodal_packing
from benchmarks.report import Row, Section, at_most
from benchmarks.timing import progress, time_calls
from headrace.block_distribution import BLOCK, distribute
from headrace.trainer.models.masked_attention import MaskRuns, masked_attention, rows_of_blocks

TOKENS, RANKS = 65_536, 4
HEADS, KV_HEADS, WIDTH = 2, 1, 32
SHARE_GOAL = 0.35


def section(*, quick: bool) -> Section:
    """The slowest of four ranks over one rank, forward alone and with the backward, in seconds of the processor."""
    num_tokens = TOKENS // 4 if quick else TOKENS
    mask = multimodal_packing(np.random.default_rng(4), num_tokens)
    ranks = distribute(mask.touched_blocks(BLOCK), RANKS)
    parts = [None, *(np.flatnonzero(ranks == rank) for rank in range(RANKS))]
    runs = [MaskRuns.of(mask, chosen=part) for part in parts]
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(num_tokens, KV_HEADS, WIDTH, generator=generator, requires_grad=True) for _ in range(2))
    queries = [torch.randn(len(rows_of_blocks(num_tokens, BLOCK, part)), HEADS, WIDTH, requires_grad=True) for part in parts]
    rows = []
    for name, call in (("forward", _forward), ("forward and backward", _both)):
        seconds = []
        for rank, (q, of_rank) in enumerate(zip(queries, runs, strict=True)):
            progress(f"attention: {name}, {'all' if rank == 0 else f'rank {rank - 1}'}")
            seconds.append(time_calls(functools.partial(call, q, k, v, of_rank), budget_s=1.0).cpu_s)
        work = max(of_rank.num_pairs for of_rank in runs[1:]) / runs[0].num_pairs
        rows.append(
            Row(
                name=f"{name}: slowest of {RANKS} ranks over one rank",
                value=max(seconds[1:]) / seconds[0],
                unit="x",
                goal=at_most(SHARE_GOAL),
                detail=f"one rank {seconds[0]:.3g} s; {work:.3f} of the pairs",
            )
        )
    heads = f"{HEADS} heads of {WIDTH}, {KV_HEADS} of keys, float32"
    return Section(title=f"attention under a packed mask of {num_tokens // 1024} k tokens, {heads}; CPU seconds", rows=rows)


def _forward(q: Tensor, k: Tensor, v: Tensor, runs: MaskRuns) -> Tensor:
    with torch.no_grad():
        return masked_attention(q, k, v, runs)


def _both(q: Tensor, k: Tensor, v: Tensor, runs: MaskRuns) -> object:
    return torch.autograd.grad(masked_attention(q, k, v, runs).sum(), (q, k, v))
