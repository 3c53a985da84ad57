"""Microbatches packed ahead into pinned memory and copied by a side stream, while the device is behind with its work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from benchmarks.gpu.target import Target
from benchmarks.report import Row, at_most
from headrace.sample import SCHEMA
from headrace.trainer.loading.buffers import BufferPool, PinnedMemory
from headrace.trainer.loading.collate import PackedMicrobatch, collate
from headrace.trainer.loading.device_copy import DeviceCopy, PendingCopy
from headrace.trainer.loading.pack_ahead import PackAhead

PATCH_VALUES = 3 * 14 * 14
NUM_SOURCES = 8
MICROBATCHES, TINY_MICROBATCHES = 1000, 60
BEHIND_CYCLES = 2_000_000
"""Of the device before it reads a microbatch, about a millisecond: a buffer that is used again too early would be seen."""
_POOL_BYTES = 64 << 20
_PINNED_GOAL_GIB = 1.0

_Key = tuple[int, int, int]  # two sources, and the number of the microbatch


def measure(target: Target) -> Iterator[Row]:
    """Yield the number of microbatches that arrived damaged, and the pinned memory that they took."""
    sources = [_batch(seed, largest=24 if target.is_gpu else 6) for seed in range(NUM_SOURCES)]
    sums = [int(np.asarray(one.column("patches").flatten()).astype(np.int64).sum()) for one in sources]
    pool, copy = BufferPool(_POOL_BYTES, pinned=PinnedMemory() if target.is_gpu else None), DeviceCopy(target.device)

    def pack(key: _Key) -> PendingCopy[PackedMicrobatch]:
        return copy.begin(collate([sources[key[0]], sources[key[1]]], patch_values=PATCH_VALUES, buffers=pool))

    rng, count = np.random.default_rng(0), MICROBATCHES if target.is_gpu else TINY_MICROBATCHES
    order: list[_Key] = [
        (int(one), int(other), number) for number, (one, other) in enumerate(rng.integers(0, NUM_SOURCES, (count, 2)))
    ]
    packing: PackAhead[_Key, PendingCopy[PackedMicrobatch]] = PackAhead(pack, lambda _: True)
    arrived = []
    packing.announce(order[0])
    for number, key in enumerate(order):
        microbatch = packing.take(key).wait()
        if number + 1 < count:
            packing.announce(order[number + 1])
        if target.is_gpu:
            torch.cuda._sleep(BEHIND_CYCLES)  # type: ignore[no-untyped-call]
        arrived.append(microbatch.patches.sum(dtype=torch.int64))
        del microbatch
    packing.close()
    damaged = sum(int(total) != sums[key[0]] + sums[key[1]] for total, key in zip(arrived, order, strict=True))
    yield Row(name="microbatches that arrived damaged", value=damaged, unit=f"of {count:,}", goal=at_most(0))
    if target.is_gpu:
        pinned = torch.cuda.host_memory_stats()["allocated_bytes.peak"] / 2**30
        yield Row(name="pinned memory, at most", value=pinned, unit="GiB", goal=at_most(_PINNED_GOAL_GIB))


def _batch(seed: int, largest: int) -> pa.RecordBatch:
    """Return one sample with two images of up to `2 * largest` patches a side."""
    rng = np.random.default_rng(seed)
    grids = [[1, 2 * int(height), 2 * int(width)] for height, width in rng.integers(2, largest, (2, 2))]
    num_patches = sum(t * height * width for t, height, width in grids)
    row: dict[str, Any] = {name: [] for name in SCHEMA.names}
    row |= {"sample_id": seed, "input_ids": [1, 2, 3], "labels": [1, 2, 3], "flags": 0, "image_grids": grids}
    row["patches"] = rng.integers(0, 256, num_patches * PATCH_VALUES, dtype=np.uint8)
    return pa.RecordBatch.from_pylist([row], schema=SCHEMA)
