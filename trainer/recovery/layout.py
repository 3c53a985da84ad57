"""What a snapshot of the nodes means for one of them: its place in a pipeline, and its share of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Self

from headrace.errors import UserError
from headrace.plan import LLM, Microbatch, StepPlan, Topology
from headrace.v1 import membership_pb2
from trainer.pipeline.routes import Routes
from trainer.pipeline.topology import PipelineTopology, Place
from trainer.recovery.spec import RecoverySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Of one node under one snapshot."""

    generation: int
    rank: int
    num_ranks: int
    pipelines: tuple[tuple[int, ...], ...]
    """The ranks of each, in pipeline order."""
    shares: tuple[int, ...]
    """Microbatches of each pipeline."""
    pipeline: int
    """This node's."""
    topology: PipelineTopology
    """Of this node's pipeline alone: a rank in it is a place in `pipelines[pipeline]`."""
    bounds: Mapping[str, tuple[int, ...]]
    """Of each unit's stages there: (0, ..., number of layers)."""

    @classmethod
    def of(cls, snapshot: membership_pb2.Snapshot, name: str, spec: RecoverySpec) -> Self | None:
        """None where the node has no place in any pipeline."""
        names = [node.name for node in snapshot.nodes]
        if name not in names:
            return None
        rank = names.index(name)
        pipelines = tuple(tuple(stage.rank for stage in pipeline.stages) for pipeline in snapshot.pipelines)
        own = next(number for number, ranks in enumerate(pipelines) if rank in ranks)
        bounds: dict[str, tuple[int, ...]] = {}
        for stage in snapshot.pipelines[own].stages:
            bounds[stage.unit] = (*bounds.get(stage.unit, (0,)), stage.end_layer)
        return cls(
            generation=snapshot.generation,
            rank=rank,
            num_ranks=len(names),
            pipelines=pipelines,
            shares=tuple(pipeline.num_microbatches for pipeline in snapshot.pipelines),
            pipeline=own,
            topology=spec.pipeline(bounds),
            bounds=bounds,
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of this node's pipeline."""
        return self.pipelines[self.pipeline]

    @property
    def place(self) -> Place:
        """Of this node in its pipeline."""
        return self.topology.place(self.ranks.index(self.rank))

    def routes(self, plan: StepPlan) -> Routes:
        """Of this node's pipeline in a step. Raises UserError for a plan that was not made for these nodes."""
        microbatches = shared(plan, self.shares)[self.pipeline]
        topology = Topology(replicas=1, microbatches=len(microbatches), stages=plan.topology.stages)
        alone = StepPlan(strategy=plan.strategy, seed=plan.seed, topology=topology, replicas=[microbatches])
        return Routes(alone, dict.fromkeys(self.topology.units, 1))


def shared(plan: StepPlan, shares: Sequence[int]) -> list[Sequence[Microbatch]]:
    """The microbatches of each pipeline.

    Where pipelines and shares are as the plan has them, and every sample stays in its replica, it is followed as it is. Else its
    microbatches are dealt out in order, and every sample passes all units in the microbatch of its loss: one that was deferred,
    or changes its replica, would cross from pipeline to pipeline.

    Raises UserError where there are other microbatches than shares.
    """
    as_planned = [len(microbatches) for microbatches in plan.replicas] == list(shares)
    if as_planned and not any(map(_crosses, plan.replicas)):
        return list(plan.replicas)
    whole = [microbatch for microbatches in plan.replicas for microbatch in microbatches]
    if len(whole) != sum(shares):
        raise UserError(
            f"the plan has {len(whole)} microbatches, but the nodes were told of {sum(shares)}: "
            "the job's topology was changed, which the nodes of a recoverable job must not see"
        )
    together = [Microbatch(units=dict.fromkeys(plan.topology.stages, microbatch.units[LLM])) for microbatch in whole]
    return [together[first:end] for first, end in pairwise(accumulate(shares, initial=0))]


def _crosses(microbatches: Sequence[Microbatch]) -> bool:
    """Whether a sample passes some of its units in another replica."""
    samples = [sorted(sample for one in microbatches for sample in one.units.get(unit, ())) for unit in microbatches[0].units]
    return any(of_unit != samples[0] for of_unit in samples)
