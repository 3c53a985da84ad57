"""AdamW whose gradients and state are sharded over a stage's replicas (ZeRO-1, Rajbhandari et al. 2020, section 5.1).

Parameters lie in buckets, of which every replica has an equal shard. A bucket's gradients are summed into the shards
(reduce-scatter) as soon as the step's last backward has left them, while it goes on; each replica updates its shards; and the new
weights come back (all-gather) while the next step begins, in which a layer waits for its own. So a replica sends and receives
(n - 1) / n of the gradients and of the weights; gradients of parameters that other groups share are summed there as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headrace.trainer.collectives import all_gather
from headrace.trainer.optimizer_spec import OptimizerSpec
from headrace.trainer.pipeline.buckets import Bucket, make_buckets
from headrace.trainer.train_step import DEFAULTS, adamw, decays

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one parameter that lies in this replica's shard of a bucket."""

    parameter: nn.Parameter
    weight: nn.Parameter
    """(n,) view of the part's weights. Its `grad` is the sum of the part's gradients, between `reduce` and `discard`."""
    begin: int
    """Index of the part's first element in the flattened parameter."""


class ShardedAdamW:
    """The optimizer of one process.

    All replicas make one with the same parameters in the same order, and with equal weights. In every step each of them calls
    `last_backward` and `ran_backward` for its chunks as it comes to them, or for none, then `reduce`, `step` and `discard`.
    """

    def __init__(
        self,
        chunks: Sequence[Sequence[nn.Parameter]],
        group: dist.ProcessGroup | None,
        *,
        settings: OptimizerSpec = DEFAULTS,
        embeddings: Collection[nn.Parameter] = (),
        shared: Sequence[tuple[Set[nn.Parameter], dist.ProcessGroup]] = (),
        part_of: Mapping[nn.Parameter, int] | None = None,
    ) -> None:
        """`chunks`: the trainable parameters of each chunk, which become views of the buckets. `group`: the data-parallel group;
        None if there is only this replica. `settings`, `embeddings`: as in `headrace.trainer.train_step.make_optimizer`.
        `shared`: parameters whose gradients are also summed over another group, all of whose processes have them in the same
        order, and that group. `part_of`: a number of each parameter; those of other numbers go into other buckets, and each
        replica keeps its shard of the weights alone. The caller sees to it that they are there when they are needed
        (`ShardedWeights`). None: every replica keeps all weights.
        """
        self._keeps_shards = part_of is not None
        self._group = group
        self._replica = 0 if group is None else dist.get_rank(group)
        num_replicas = 1 if group is None else dist.get_world_size(group)
        self._shared: list[tuple[list[Bucket], dist.ProcessGroup]] = [([], other) for _, other in shared]
        self._of_chunk: list[list[Bucket]] = []
        for parameters in chunks:
            rest = [parameter for parameter in parameters[::-1] if not any(parameter in some for some, _ in shared)]
            self._of_chunk.append(_make(rest, num_replicas, part_of))
            for (some, _), (buckets, _) in zip(shared, self._shared, strict=True):  # so that shards are alike in the other group
                made = _make([parameter for parameter in parameters[::-1] if parameter in some], num_replicas, part_of)
                buckets += made
                self._of_chunk[-1] += made
        # In the order in which gradients come, which all replicas keep to: the last chunk's first, and the last layer's in it.
        self._buckets = [bucket for buckets in reversed(self._of_chunk) for bucket in buckets]
        self.bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        """The bucket of each parameter."""
        for bucket in self._buckets if self._keeps_shards else ():
            bucket.keep_shard(self._replica)
        self._pieces = {bucket: [Piece(*piece) for piece in bucket.pieces(self._replica)] for bucket in self._buckets}
        self._piece_of = {piece.parameter: piece for pieces in self._pieces.values() for piece in pieces}
        decaying: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for piece in self.pieces:
            decaying[decays(piece.parameter, settings, embeddings)].append(piece.weight)
        self._adamw = adamw(decaying[True], decaying[False], settings)
        self._num_begun = 0  # buckets whose gradients are being summed, the first ones of all
        self._complete: set[Bucket] = set()  # those whose gradients this replica has computed
        self._missing: dict[Bucket, set[nn.Parameter]] = {}  # parameters that the last backward has not come to yet
        self._hooks: list[RemovableHandle] = []

    @property
    def pieces(self) -> Iterable[Piece]:
        """The parts of parameters that this replica updates."""
        return self._piece_of.values()

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of all parameters."""
        return sum(bucket.weights.nbytes for bucket in self._buckets)

    @property
    def bucket_bytes(self) -> int:
        """Bytes of the largest bucket, which its gradients are copied into before they are summed."""
        return max((bucket.weights.nbytes for bucket in self._buckets), default=0)

    @property
    def moment_bytes(self) -> int:
        """Bytes of the moments of this replica's pieces once they have been updated."""
        return sum(len(_MOMENTS) * piece.weight.nbytes for piece in self.pieces)

    def last_backward(self, chunk: int) -> None:
        """Begin from now on to sum each of a chunk's buckets as soon as all its parameters have a gradient of the next backward,
        the chunk's last one in this step.
        """
        for bucket in self._of_chunk[chunk]:
            self._missing[bucket] = set(bucket.parameters)
            for parameter in bucket.parameters:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._came_to))  # type: ignore[no-untyped-call]

    def ran_backward(self, chunk: int) -> None:
        """Begin to sum all buckets of a chunk, none of whose actions is left in this step."""
        self._end_hooks()
        self._complete.update(self._of_chunk[chunk])
        self._begin_sums()

    def reduce(self) -> None:
        """Wait until each piece has its gradient. A parameter that has none on any replica keeps none. Collective."""
        self._end_hooks()
        self._complete.update(self._buckets)
        self._begin_sums()
        exists = self._exists()
        for buckets, group in self._shared:
            for bucket in buckets:
                bucket.sum_over(group)
        for bucket in self._buckets:
            shard = bucket.summed()
            first = self._replica * len(shard)
            for piece in self._pieces[bucket]:
                begin = bucket.place(piece.parameter) + piece.begin - first
                summed = shard[begin : begin + piece.weight.numel()]
                piece.weight.grad = summed if exists[piece.parameter] else None

    def step(self, learning_rate: float) -> None:
        """Update every piece that has a gradient, and begin to exchange the new weights where all keep them. Collective."""
        for options in self._adamw.param_groups:
            options["lr"] = learning_rate
        self._adamw.step()
        if self._group is not None and not self._keeps_shards:
            for bucket in reversed(self._buckets):  # the first layers are the first that need them
                bucket.begin_gather(self._group, self._replica)

    def waiting_for(self, parameters: Iterable[nn.Parameter]) -> Callable[[], None]:
        """Return a function that waits until these of the parameters which are trained have the weights of the last step."""
        buckets = tuple(dict.fromkeys(self.bucket_of[p] for p in parameters if p in self.bucket_of))

        def wait() -> None:
            for bucket in buckets:
                bucket.end_gather()

        return wait

    def wait(self) -> None:
        """Wait until all parameters have the weights of the last step."""
        for bucket in self._buckets:
            bucket.end_gather()

    def discard(self) -> None:
        """Drop all gradients of the step."""
        self._end_hooks()
        for bucket in self._buckets:
            bucket.discard()
        for piece in self.pieces:
            piece.weight.grad = None
        self._num_begun = 0
        self._complete.clear()

    def writes(self, parameter: nn.Parameter) -> bool:
        """Whether this replica writes the parameter to checkpoints: it has the parameter's first element in its shard."""
        piece = self._piece_of.get(parameter)
        return piece is not None and piece.begin == 0

    def state(self) -> Iterator[tuple[nn.Parameter, dict[str, Tensor]]]:
        """Yield the state, by kind, of all parameters that this replica writes and that were ever updated. Collective.

        It is `step` of shape (), and `exp_avg` and `exp_avg_sq` of the parameter's shape, all float32. The moments are gathered
        bucket by bucket: a caller that keeps none of them, but copies each, needs memory for those of two buckets at most.
        All replicas go through it to its end.
        """
        for bucket in self._buckets:
            yield from self._state_of(bucket)

    def _state_of(self, bucket: Bucket) -> Iterator[tuple[nn.Parameter, dict[str, Tensor]]]:
        wholes = {kind: self._whole(bucket, kind) for kind in _MOMENTS}
        for parameter in filter(self.writes, bucket.parameters):
            if own := self._adamw.state.get(self._piece_of[parameter].weight):
                begin = bucket.place(parameter)
                moments = {kind: some[begin : begin + parameter.numel()].view_as(parameter) for kind, some in wholes.items()}
                yield parameter, {"step": own["step"], **moments}

    def owns(self, parameter: nn.Parameter) -> bool:
        """Whether this replica has state of a part of the parameter."""
        return parameter in self._piece_of

    def load_state(self, parameter: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        """Set the state of this replica's part of a parameter from that of the whole one, as `state` returned it."""
        piece = self._piece_of[parameter]
        end = piece.begin + piece.weight.numel()
        moments = {kind: state[kind].flatten()[piece.begin : end].clone() for kind in _MOMENTS}
        self._adamw.state[piece.weight] = {"step": state["step"].clone(), **moments}

    def _came_to(self, parameter: nn.Parameter) -> None:
        bucket = self.bucket_of[parameter]
        self._missing[bucket].discard(parameter)
        if not self._missing[bucket]:
            self._complete.add(bucket)
            self._begin_sums()

    def _begin_sums(self) -> None:
        while self._num_begun < len(self._buckets) and self._buckets[self._num_begun] in self._complete:
            self._buckets[self._num_begun].begin_sum(self._group)
            self._num_begun += 1

    def _end_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._missing.clear()

    def _exists(self) -> dict[nn.Parameter, bool]:
        """Return for each parameter whether any replica, or process of a group that shares it, has a gradient of it."""
        flags = {parameter: bucket.has_gradient(parameter) for parameter, bucket in self.bucket_of.items()}
        if self._group is not None:
            _any_of(flags, flags, self._group)
        for buckets, group in self._shared:
            _any_of(flags, [parameter for bucket in buckets for parameter in bucket.parameters], group)
        return flags

    def _whole(self, bucket: Bucket, kind: str) -> Tensor:
        """Gather one moment of all parameters of a bucket; zeros for those that were never updated."""
        whole = torch.zeros_like(bucket.weights)
        for piece in self._pieces[bucket]:
            state: dict[str, Any] = self._adamw.state.get(piece.weight, {})
            if state:
                begin = bucket.place(piece.parameter) + piece.begin
                whole[begin : begin + piece.weight.numel()] = state[kind]
        if self._group is not None:
            all_gather(whole, bucket.shard(whole, self._replica), self._group)
        return whole


def _make(parameters: Sequence[nn.Parameter], num_replicas: int, part_of: Mapping[nn.Parameter, int] | None) -> list[Bucket]:
    if part_of is None:
        return make_buckets(parameters, num_replicas)
    runs = groupby(parameters, key=part_of.__getitem__)
    return [bucket for _, run in runs for bucket in make_buckets(list(run), num_replicas)]


def _any_of(flags: dict[nn.Parameter, bool], parameters: Collection[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Set the flags of these parameters to whether that of any process in the group is set."""
    if parameters:
        own = torch.tensor([flags[parameter] for parameter in parameters], dtype=torch.uint8)
        everywhere = own.to(next(iter(parameters)).device)
        dist.all_reduce(everywhere, dist.ReduceOp.MAX, group=group)
        flags |= zip(parameters, everywhere.bool().tolist(), strict=True)
