"""AdamW whose state is spread over the replicas of a stage (ZeRO-1, Rajbhandari et al. 2020, section 5.1), more than once.

Every parameter has `copies` owners among the replicas. They hold its moments and update it alike; the other replicas receive
the new value. So memory of the state is copies / replicas of the whole, and it survives the loss of any copies - 1 replicas.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headrace.trainer.gradients import buckets
from headrace.trainer.optimizer_spec import OptimizerSpec
from headrace.trainer.train_step import DEFAULTS, make_optimizer

COPIES = 2
"""f + 1 for f = 1: one replica of a stage may be lost."""


class ShardedAdamW:
    """The optimizer of one process. All replicas make one with the same parameters in the same order, and call `step` alike.

    Replicas must begin with equal weights and come to every step with equal gradients, bit for bit, as a sum over them leaves
    both. Then the owners of a parameter stay equal bit for bit.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup | None,
        *,
        copies: int = COPIES,
        settings: OptimizerSpec = DEFAULTS,
        embeddings: Collection[nn.Parameter] = (),
    ) -> None:
        """`group`: of the replicas; None where there is only this one. `copies`: at most as many as there are replicas. The
        rest as of `headrace.trainer.train_step.make_optimizer`.
        """
        self._parameters = parameters
        self._group = group
        self._replica = 0 if group is None else dist.get_rank(group)
        num_replicas = 1 if group is None else dist.get_world_size(group)
        self._spread = copies < num_replicas
        sizes = [parameter.numel() for parameter in parameters]
        self._owners = dict(zip(parameters, owners(sizes, num_replicas, copies), strict=True))
        owned = [parameter for parameter in parameters if self._replica in self._owners[parameter]]
        self._adamw = make_optimizer(owned, settings, embeddings=embeddings)

    def step(self, learning_rate: float) -> None:
        """Update, on all replicas, every parameter that has a gradient."""
        for options in self._adamw.param_groups:
            options["lr"] = learning_rate
        self._adamw.step()
        if self._spread:
            self._receive([parameter for parameter in self._parameters if parameter.grad is not None])

    def writes(self, parameter: nn.Parameter) -> bool:
        """Whether this replica is the first owner: the one that speaks for the others."""
        return self._owners[parameter][0] == self._replica

    def owns(self, parameter: nn.Parameter) -> bool:
        """Whether this replica has the parameter's moments."""
        return self._replica in self._owners[parameter]

    def state(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        """Of an owned parameter: `step` (), `exp_avg` and `exp_avg_sq` of its shape, float32; empty before its first update."""
        state: dict[str, Tensor] = self._adamw.state.get(parameter, {})
        return state

    def load_state(self, parameter: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        """Of an owned parameter, as `state` gave it; the tensors are then the optimizer's."""
        self._adamw.state[parameter] = dict(state)

    @torch.no_grad()
    def _receive(self, parameters: Iterable[nn.Parameter]) -> None:
        """Every parameter's value from its first owner."""
        by_source: dict[int, list[Tensor]] = {}
        for parameter in parameters:
            by_source.setdefault(self._owners[parameter][0], []).append(parameter)
        for source, sent in sorted(by_source.items()):
            for bucket in buckets(sent):
                flat = torch.cat([tensor.flatten() for tensor in bucket])
                dist.broadcast(flat, group=self._group, group_src=source)
                for tensor, new in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
                    tensor.copy_(new.view_as(tensor))


def owners(sizes: Sequence[int], num_replicas: int, copies: int) -> list[tuple[int, ...]]:
    """For parameters of so many elements: min(copies, num_replicas) replicas each, the least loaded first.

    The elements that any two replicas own differ by no more than the largest parameter has.
    """
    load = [0] * num_replicas
    chosen: list[tuple[int, ...]] = [()] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        chosen[number] = tuple(sorted(range(num_replicas), key=lambda replica: load[replica])[:copies])
        for replica in chosen[number]:
            load[replica] += sizes[number]
    return chosen
