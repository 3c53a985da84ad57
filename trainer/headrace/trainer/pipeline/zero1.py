"""AdamW whose state is sharded over a stage's replicas (ZeRO-1, Rajbhandari et al. 2020, section 5.1), in several copies.

Every parameter has `copies` owners among the replicas, which hold its moments and compute the same update; the other replicas
receive the new value. A replica so holds copies / replicas of the state, which survives the loss of any copies - 1 replicas.
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
"""Default number of copies of the optimizer state: f + 1 for f = 1, so that one replica of a stage may be lost."""


class ShardedAdamW:
    """The optimizer of one process: AdamW with sharded state.

    All replicas make one with the same parameters in the same order, and call `step` alike. They must begin with equal weights
    and come to every step with equal gradients, bit for bit, as an all-reduce leaves them. Then the owners of a parameter stay
    equal bit for bit.
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
        """`group`: the data-parallel group; None if there is only this replica. `copies`: owners per parameter, capped at the
        number of replicas. `settings`, `embeddings`: as in `headrace.trainer.train_step.make_optimizer`.
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
        """Update every parameter that has a gradient, on all replicas. A collective call."""
        for options in self._adamw.param_groups:
            options["lr"] = learning_rate
        self._adamw.step()
        if self._spread:
            self._receive([parameter for parameter in self._parameters if parameter.grad is not None])

    def writes(self, parameter: nn.Parameter) -> bool:
        """Whether this replica is the parameter's first owner, which broadcasts its value and writes it to checkpoints."""
        return self._owners[parameter][0] == self._replica

    def owns(self, parameter: nn.Parameter) -> bool:
        """Whether this replica holds the parameter's moments."""
        return self._replica in self._owners[parameter]

    def state(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        """Return the state of an owned parameter, empty before its first update.

        It is `step` of shape (), and `exp_avg` and `exp_avg_sq` of the parameter's shape, all float32.
        """
        state: dict[str, Tensor] = self._adamw.state.get(parameter, {})
        return state

    def load_state(self, parameter: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        """Set the state of an owned parameter, as `state` returned it. The optimizer keeps and changes the tensors."""
        self._adamw.state[parameter] = dict(state)

    @torch.no_grad()
    def _receive(self, parameters: Iterable[nn.Parameter]) -> None:
        """Broadcast each parameter's new value from its first owner to all replicas."""
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
    """Return min(copies, num_replicas) owners for each parameter: the replicas that own the fewest elements so far.

    Parameters are assigned from the largest on, so the numbers of elements that any two replicas own differ by no more than
    the size of the largest parameter. sizes: elements of each parameter.
    """
    load = [0] * num_replicas
    chosen: list[tuple[int, ...]] = [()] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        chosen[number] = tuple(sorted(range(num_replicas), key=lambda replica: load[replica])[:copies])
        for replica in chosen[number]:
            load[replica] += sizes[number]
    return chosen
