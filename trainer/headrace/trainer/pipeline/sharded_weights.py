"""Weights of which each replica of a stage keeps a shard, and which are gathered for the layer that runs (ZeRO-3).

Rajbhandari et al. 2020, section 5.3: while a layer runs, and the one behind it is on its way, all other weights of a stage are
nowhere as a whole. The replicas gather them together, so that all go through the parts of a chunk in the same order and equally
often in every action: one that has nothing to compute in it, or less than another, gathers all the same (all replicas run the
same actions by `PipelineTopology.shards_weights`). Gradients stay whole until the last backward of a step, as without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import groupby, pairwise
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from headrace.trainer.pipeline.buckets import Bucket, make_buckets

Key = TypeVar("Key")


class ShardedWeights:
    """The weights of one chunk. Its parts are what stands in front of the layers, each layer, and what stands behind them."""

    def __init__(self, parts: Sequence[Sequence[Bucket]], group: dist.ProcessGroup) -> None:
        """`parts`: the buckets of each part, all of which keep a shard; one may be in several. `group`: the replicas."""
        self._parts, self._group, self._replica = parts, group, dist.get_rank(group)
        self._way: Sequence[int] = ()
        self._at = -1

    @property
    def buckets(self) -> Set[Bucket]:
        """The buckets of all parts."""
        return {bucket for part in self._parts for bucket in part}

    @property
    def gathered_bytes(self) -> int:
        """Most bytes of weights that are there at a time in a pass, beside those that are kept."""
        return max(sum(bucket.weights.nbytes for bucket in {*one, *other}) for one, other in pairwise(self._parts))

    @contextmanager
    def passing(self, *, backward: bool) -> Iterator[None]:
        """Go through all parts, forth or back, whether what runs inside needs them or not. A collective call."""
        numbers = range(len(self._parts))
        self._way, self._at = numbers[::-1] if backward else numbers, -1
        self.need(self._way[0])
        yield
        self.need(self._way[-1])
        self._free(self._way)

    def before(self, part: int, x: Tensor) -> None:
        """Have the weights of a part there, and in the backward those of the part before it. x: the input of the part."""
        if x.requires_grad:
            x.register_hook(lambda _: self.need(part - 1))  # type: ignore[no-untyped-call]
        self.need(part)

    def need(self, part: int) -> None:
        """Have the weights of a part of the pass there; those of the parts before it in the pass are given back."""
        place = self._way.index(part)
        while self._at < place:
            self._at += 1
            here = self._parts[self._way[self._at]]
            self._begin(here)
            for bucket in here:
                bucket.end_gather()
            self._free(self._way[: self._at], self._way[self._at : self._at + 2])
            if self._at + 1 < len(self._way):
                self._begin(self._parts[self._way[self._at + 1]])

    def _begin(self, part: Sequence[Bucket]) -> None:
        for bucket in part:
            if not bucket.is_there:
                bucket.begin_gather(self._group, self._replica)

    def _free(self, parts: Sequence[int], but: Sequence[int] = ()) -> None:
        stay = {bucket for part in but for bucket in self._parts[part]}
        for bucket in {bucket for part in parts for bucket in self._parts[part]} - stay:
            bucket.free()


def frozen_buckets(part_of: Mapping[nn.Parameter, int], group: dist.ProcessGroup) -> dict[nn.Parameter, Bucket]:
    """Have each replica keep its shard of frozen parameters, and return the bucket of each. part_of: the part of each."""
    found: dict[nn.Parameter, Bucket] = {}
    runs = groupby(part_of, key=lambda parameter: (part_of[parameter], parameter.dtype))
    for bucket in (bucket for _, run in runs for bucket in make_buckets(list(run), dist.get_world_size(group))):
        bucket.keep_shard(dist.get_rank(group))
        found |= dict.fromkeys(bucket.parameters, bucket)
    return found


def whole(
    held: Iterable[tuple[Key, nn.Parameter]],
    buckets: Mapping[nn.Parameter, Bucket],
    group: dist.ProcessGroup | None,
    *,
    writes: bool = False,
) -> Iterator[tuple[Key, nn.Parameter]]:
    """Yield parameters with what they are known by, each while its values are there. All replicas go through it to its end.

    buckets: of those of which a shard is kept. writes: whether the caller writes the values of all of a bucket's parameters.
    """
    for bucket, some in groupby(held, key=lambda one: buckets.get(one[1])):
        if bucket is None or group is None:
            yield from some
            continue
        replica = dist.get_rank(group)
        bucket.begin_gather(group, replica)
        bucket.end_gather()
        yield from some
        if writes:
            bucket.keep_shard(replica)
        bucket.free()
