"""Collectives of whole tensors and equal shards, which torch 2.13 has given other names than the releases before it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor


def reduce_scatter(shard: Tensor, numbers: Tensor, group: dist.ProcessGroup | None, *, async_op: bool = False) -> Any:
    """Sum `numbers` of all ranks, and write this rank's share of the sum to `shard`. Returns the work where `async_op` is set."""
    return _named("reduce_scatter_single", "reduce_scatter_tensor")(shard, numbers, group=group, async_op=async_op)


def all_gather(numbers: Tensor, shard: Tensor, group: dist.ProcessGroup | None, *, async_op: bool = False) -> Any:
    """Write the shards of all ranks to `numbers`, in the ranks' order. Returns the work where `async_op` is set."""
    return _named("all_gather_single", "all_gather_into_tensor")(numbers, shard, group=group, async_op=async_op)


def _named(name: str, before: str) -> Any:
    return getattr(dist, name if hasattr(dist, name) else before)
