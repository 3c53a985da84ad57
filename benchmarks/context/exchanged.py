"""Attention over four processes that exchange keys and values with gloo: what it costs the slowest one, and the bytes it gets."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.context.random_masks import multimodal_packing
from benchmarks.report import Row, Section, at_most
from benchmarks.timing import progress
from headrace.trainer import collectives
from headrace.trainer.context.context_share import ContextShare
from headrace.trainer.context.gathered_attention import GatheredAttention
from headrace.trainer.models.masked_attention import masked_attention

TOKENS, RANKS, REPETITIONS = 65_536, 4, 2
HEADS, KV_HEADS, WIDTH = 2, 2, 32
SHARE_GOAL = 0.35
TIMEOUT_S = 300.0


def section(*, quick: bool) -> Section:
    """Seconds of the processor, as two cores carry four ranks; and bytes in the collectives beside those that are foretold."""
    num_tokens = TOKENS // 4 if quick else TOKENS
    progress(f"attention over {RANKS} processes")
    with tempfile.TemporaryDirectory(prefix="headrace-context-") as name:
        context = multiprocessing.get_context("forkserver")
        processes = [context.Process(target=_measure, args=(rank, Path(name), num_tokens)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        of_ranks = [json.loads((Path(name) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    alone_s, slowest_s = of_ranks[0]["alone_s"], max(one["cpu_s"] for one in of_ranks)
    received, planned = (sum(one[what] for one in of_ranks) for what in ("received", "planned"))
    shape = f"{HEADS} heads of {WIDTH}, {KV_HEADS} of keys, float32"
    rows = [
        Row(
            name=f"forward and backward with collectives: slowest of {RANKS} ranks over one rank",
            value=slowest_s / alone_s,
            unit="x",
            goal=at_most(SHARE_GOAL),
            detail=f"one rank {alone_s:.3g} s, the ranks " + ", ".join(f"{one['cpu_s']:.3g}" for one in of_ranks),
        ),
        Row(
            name="the same while nothing is exchanged",
            value=max(one["computing_s"] for one in of_ranks) / alone_s,
            unit="x",
            detail="the same queries and keys, which each rank has already",
        ),
        Row(
            name="bytes received beside those foretold: difference",
            value=abs(received - planned),
            unit="bytes",
            goal=at_most(0.0),
            detail=f"{received:,} by all ranks together",
        ),
    ]
    title = f"attention under a packed mask of {num_tokens // 1024} k tokens over {RANKS} gloo processes, {shape}; CPU seconds"
    return Section(title=title, rows=rows)


def _measure(rank: int, folder: Path, num_tokens: int) -> None:
    """In one of the processes: write what it took."""
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT_S))
    group = dist.group.WORLD
    mask = multimodal_packing(np.random.default_rng(4), num_tokens)
    share, whole = ContextShare.of(mask, group), ContextShare.of(mask, None)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(num_tokens, heads, WIDTH, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    own = [x[share.places].requires_grad_() for x in tensors]
    received = _count_received()
    attention = share.attention
    assert isinstance(attention, GatheredAttention)
    _both(attention, own)
    planned = attention.gathered_bytes(KV_HEADS, WIDTH, torch.float32) * 2
    planned += attention.scattered_bytes(KV_HEADS, WIDTH, torch.float32)
    answer: dict[str, float] = {"received": received[0], "planned": planned}
    answer["cpu_s"] = _least_s(lambda: _both(attention, own))
    dist.barrier()
    runs, keys = attention.runs, [x.requires_grad_() for x in tensors]
    answer["computing_s"] = _least_s(lambda: _both(lambda q, k, v: masked_attention(q, k, v, runs), [own[0], *keys[1:]]))
    dist.barrier()
    if rank == 0:
        answer["alone_s"] = _least_s(lambda: _both(whole.attention, keys))
    (folder / f"{rank}.json").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


def _both(attend: Callable[[Tensor, Tensor, Tensor], Tensor], tensors: list[Tensor]) -> None:
    torch.autograd.grad(attend(*tensors).sum(), tensors)


def _least_s(call: Callable[[], object]) -> float:
    """Return the least seconds of the processor, those of gloo's threads included."""
    seconds = []
    for _ in range(REPETITIONS):
        began_s = process_time()
        call()
        seconds.append(process_time() - began_s)
    return min(seconds)


def _count_received() -> list[int]:
    """Have the collectives of attention count, in place, what comes from other ranks: of a sum, what others add to this share."""
    count = [0]
    gather, scatter = collectives.all_gather, collectives.reduce_scatter

    def counted_gather(numbers: Tensor, shard: Tensor, *arguments: Any, **options: Any) -> Any:
        count[0] += numbers.nbytes - shard.nbytes
        return gather(numbers, shard, *arguments, **options)

    def counted_scatter(shard: Tensor, numbers: Tensor, *arguments: Any, **options: Any) -> Any:
        count[0] += numbers.nbytes - shard.nbytes
        return scatter(shard, numbers, *arguments, **options)

    collectives.all_gather, collectives.reduce_scatter = counted_gather, counted_scatter
    return count
