"""What a snapshot of the nodes means for one of them: its place in a pipeline, and its share of a plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Self

from headrace.errors import UserError
from headrace.plan import LLM, Microbatch, StepPlan, Topology
from headrace.snapshot import NOBODY, is_rerouted
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from headrace.trainer.recovery.nodes_spec import RecoverySpec
from headrace.v1 import membership_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A step that some pipelines have done their share of. Its microbatches are counted through all replicas of the plan."""

    step: int
    done: tuple[frozenset[int], ...]
    """By each pipeline, whose nodes have the gradients."""

    @classmethod
    def of(cls, step: int, done: Sequence[frozenset[int]], pipelines: Sequence[Sequence[int]]) -> Self | None:
        """None where all is to be done. done: what each rank has gradients of.

        Those of a pipeline count if all of its nodes have the same.
        """
        counted: list[frozenset[int]] = []
        for ranks in pipelines:
            said = {done[rank] if rank != NOBODY else frozenset[int]() for rank in ranks}
            own = said.pop()
            counted.append(frozenset() if said or own.intersection(chain.from_iterable(counted)) else own)
        return cls(step=step, done=tuple(counted)) if any(counted) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Of one node under one snapshot."""

    generation: int
    rank: int
    num_ranks: int
    pipelines: tuple[tuple[int, ...], ...]
    """The ranks of each, in pipeline order; NOBODY where a node was lost, and others do the pipeline's microbatches."""
    shares: tuple[int, ...]
    """Microbatches of each pipeline."""
    pipeline: int
    """This node's."""
    topology: PipelineTopology
    """Of this node's pipeline alone: a rank in it is a place in `pipelines[pipeline]`."""
    bounds: Mapping[str, tuple[int, ...]]
    """Of each unit's stages there: (0, ..., number of layers)."""
    resumed: Resumed | None = None
    """A step of which some is done."""

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

    def resume(self, step: int, done: Sequence[frozenset[int]]) -> Self:
        """With what each rank has done of a step."""
        return replace(self, resumed=Resumed.of(step, done, self.pipelines))

    @property
    def keeps(self) -> bool:
        """Whether this node's pipeline has done a part of the resumed step."""
        return self.resumed is not None and bool(self.resumed.done[self.pipeline])

    def assigned(self, step: int, plan: StepPlan, seconds: Sequence[float]) -> tuple[Sequence[int], StepPlan]:
        """The numbers of the microbatches that this node's pipeline is to do in a step, and a plan of these alone.

        Where pipelines and shares are as the plan has them, and every sample stays in its replica, it is followed as it is. Else
        its microbatches are dealt out, and every sample passes all units in the microbatch of its loss: one that was deferred, or
        changes its replica, would cross from pipeline to pipeline. seconds: predicted, of each microbatch of the plan.

        Raises UserError for a plan that was not made for these nodes.
        """
        together, first = _together(plan, sum(self.shares)), sum(self.shares[: self.pipeline])
        done = self.resumed.done if self.resumed is not None and self.resumed.step == step else ()
        if not done and _is_followed(plan, self.shares):
            numbers: Sequence[int] = range(first, first + self.shares[self.pipeline])
            microbatches = list(plan.replicas[self.pipeline])
        else:
            numbers = deal(seconds, self.shares, set(range(len(together))).difference(*done))[self.pipeline]
            microbatches = [together[number] for number in numbers]
        microbatches = microbatches or [Microbatch(units=dict.fromkeys(plan.topology.stages, ()))]
        topology = Topology(replicas=1, microbatches=len(microbatches), stages=plan.topology.stages)
        return numbers, StepPlan(strategy=plan.strategy, seed=plan.seed, topology=topology, replicas=[microbatches])


def finishes(name: str, running: membership_pb2.Snapshot, newer: membership_pb2.Snapshot) -> bool:
    """Whether a node's pipeline of one snapshot is to do its share of the step under way before it follows a newer one: where
    that has a pipeline that lacks a node, and this one as it is."""
    own = [pipeline for pipeline in _named(running) if name in (node for node, *_ in pipeline)]
    return is_rerouted(newer) and any(pipeline in _named(newer) for pipeline in own)


def _named(snapshot: membership_pb2.Snapshot) -> list[list[tuple[str, str, int, int]]]:
    """Node, unit and layers of every stage of every pipeline."""
    names = {rank: node.name for rank, node in enumerate(snapshot.nodes)}
    return [
        [(names.get(stage.rank, ""), stage.unit, stage.first_layer, stage.end_layer) for stage in pipeline.stages]
        for pipeline in snapshot.pipelines
    ]


def deal(seconds: Sequence[float], shares: Sequence[int], numbers: Collection[int]) -> list[list[int]]:
    """Microbatches for each pipeline: the longest first, each to the one that is done with it the earliest (LPT; Graham, 1969).

    seconds: of each microbatch, at the same pace; those far below the longest take some time as well. shares: as the pipelines
    are fast, 0 for one that takes none. numbers: of the microbatches that are dealt out.
    """
    least = max(0.02 * max(seconds), 1e-9)
    dealt: list[list[int]] = [[] for _ in shares]
    busy_s = [0.0] * len(shares)
    able = [pipeline for pipeline, share in enumerate(shares) if share]
    for number in sorted(numbers, key=lambda number: (-seconds[number], number)):
        took_s = max(seconds[number], least)
        first = min(able, key=lambda pipeline: (busy_s[pipeline] + took_s) / shares[pipeline])
        busy_s[first] += took_s
        dealt[first].append(number)
    return [sorted(own) for own in dealt]


def _is_followed(plan: StepPlan, shares: Sequence[int]) -> bool:
    as_planned = [len(microbatches) for microbatches in plan.replicas] == list(shares)
    return as_planned and not any(map(_crosses, plan.replicas))


def _together(plan: StepPlan, count: int) -> list[Microbatch]:
    """All microbatches, each with the samples of its loss in every unit."""
    whole = [microbatch for microbatches in plan.replicas for microbatch in microbatches]
    if len(whole) != count:
        raise UserError(
            f"the plan has {len(whole)} microbatches, but the nodes were told of {count}: "
            "the job's topology was changed, which the nodes of a recoverable job must not see"
        )
    return [Microbatch(units=dict.fromkeys(plan.topology.stages, microbatch.units[LLM])) for microbatch in whole]


def _crosses(microbatches: Sequence[Microbatch]) -> bool:
    """Whether a sample passes some of its units in another replica."""
    samples = [sorted(sample for one in microbatches for sample in one.units.get(unit, ())) for unit in microbatches[0].units]
    return any(of_unit != samples[0] for of_unit in samples)
