"""Parameters that lie one behind the other in memory, so that one message has the gradients, or the weights, of many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headrace.trainer.collectives import all_gather, reduce_scatter

BUCKET_ELEMENTS = 2**23
"""Most elements of a bucket, 32 MiB of float32, unless a single parameter has more."""


class Bucket:
    """Consecutive parameters of one chunk, of whose elements each replica has an equal shard; padded at the end."""

    def __init__(self, parameters: Sequence[nn.Parameter], num_replicas: int) -> None:
        """`parameters`: of one dtype, on one device. They become views of `weights`, with the values that they have."""
        self.parameters = parameters
        self._places: dict[nn.Parameter, int] = {}
        length = 0
        for parameter in parameters:
            self._places[parameter] = length
            length += parameter.numel()
        self._shard = -(-length // num_replicas)
        first = parameters[0]
        self.weights = torch.zeros(self._shard * num_replicas, dtype=first.dtype, device=first.device)
        """(elements,) the weights of all parameters in their order, then zeros. Without memory after `keep_shard`, but for the
        time from `begin_gather` to `free`."""
        self._kept: Tensor | None = None
        with torch.no_grad():
            for parameter in parameters:
                view = self._part(self.weights, parameter)
                view.copy_(parameter)
                parameter.data = view
        self._with_gradient: set[nn.Parameter] = set()  # on this replica, in this step
        self._sum: tuple[dist.Work | None, Tensor] | None = None  # what is summed, and its shard
        self._gather: dist.Work | None = None

    def place(self, parameter: nn.Parameter) -> int:
        """Return the index of a parameter's first element in the bucket."""
        return self._places[parameter]

    def shard(self, elements: Tensor, replica: int) -> Tensor:
        """Return the view of a replica's shard of (elements,) all elements."""
        return elements[self._shard * replica : self._shard * (replica + 1)]

    def keep_shard(self, replica: int) -> None:
        """Keep no more than a replica's shard from now on, with its present values."""
        own = self.shard(self.weights, replica)
        if self._kept is None:
            self._kept = own.clone()
        else:
            self._kept.copy_(own)
        self.free()

    @property
    def kept_bytes(self) -> int:
        """Bytes of what is kept between two uses of the weights."""
        return self.weights.nbytes if self._kept is None else self._kept.nbytes

    @property
    def is_there(self) -> bool:
        """Whether the weights have memory."""
        return self.weights.untyped_storage().nbytes() > 0

    def free(self) -> None:
        """Give back the memory of all weights but the shard that is kept."""
        self.weights.untyped_storage().resize_(0)

    def pieces(self, replica: int) -> Iterator[tuple[nn.Parameter, nn.Parameter, int]]:
        """Yield each parameter of which a replica's shard has a part, a view of that part of `weights`, and the part's first
        index in the parameter.
        """
        first, end = self._shard * replica, self._shard * (replica + 1)
        for parameter, place in self._places.items():
            begin, behind = max(first, place), min(end, place + parameter.numel())
            if begin < behind:
                part = self.weights[begin:behind] if self._kept is None else self._kept[begin - first : behind - first]
                yield parameter, nn.Parameter(part), begin - place

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter had a gradient on this replica when `begin_sum` was called."""
        return parameter in self._with_gradient

    def begin_sum(self, group: dist.ProcessGroup | None) -> None:
        """Begin to sum the gradients over the replicas (reduce-scatter), and take them from the parameters.

        `group`: the data-parallel group; None if there is only one replica.
        """
        gradients = torch.zeros_like(self.weights)
        for parameter in self.parameters:
            if parameter.grad is not None:
                self._with_gradient.add(parameter)
                self._part(gradients, parameter).copy_(parameter.grad)
                parameter.grad = None
        if group is None:
            self._sum = None, gradients
        else:
            shard = gradients.new_empty(self._shard)
            self._sum = reduce_scatter(shard, gradients, group, async_op=True), shard

    def sum_over(self, group: dist.ProcessGroup) -> None:
        """Wait for the sums that were begun, and sum this replica's shard of them over another group."""
        dist.all_reduce(self.summed(), group=group)

    def summed(self) -> Tensor:
        """Wait for the sums that were begun, and return those of this replica's shard."""
        assert self._sum is not None, "begin_sum comes first"
        work, shard = self._sum
        if work is not None:
            work.wait()  # once, as each wait for gloo's reduce-scatter writes the shard
            self._sum = None, shard
        return shard

    def begin_gather(self, group: dist.ProcessGroup, replica: int) -> None:
        """Begin to exchange the replicas' shards of the weights (all-gather)."""
        if self._kept is None:
            own = self.shard(self.weights, replica)
        else:
            own = self._kept
            self.weights.untyped_storage().resize_(self.weights.nbytes)
        self._gather = all_gather(self.weights, own, group, async_op=True)

    def end_gather(self) -> None:
        """Wait for the weights of all replicas, if they are on their way."""
        if self._gather is not None:
            self._gather.wait()
            self._gather = None

    def discard(self) -> None:
        """Drop all gradients, once those that are being summed have been."""
        if self._sum is not None:
            self.summed()
            self._sum = None
        self._with_gradient = set()
        for parameter in self.parameters:
            parameter.grad = None

    def _part(self, elements: Tensor, parameter: nn.Parameter) -> Tensor:
        place = self._places[parameter]
        return elements[place : place + parameter.numel()].view_as(parameter)


def make_buckets(parameters: Sequence[nn.Parameter], num_replicas: int) -> list[Bucket]:
    """Put consecutive parameters into buckets of at most BUCKET_ELEMENTS, larger ones by themselves."""
    found: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        if not found or parameter.numel() > room:
            found.append([])
            room = BUCKET_ELEMENTS
        found[-1].append(parameter)
        room -= parameter.numel()
    return [Bucket(some, num_replicas) for some in found]
