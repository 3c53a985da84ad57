"""What a membership snapshot means for one process of a node: its place in a pipeline, and its pipeline's share of each plan."""

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
    """A step that was interrupted after some of its microbatches were done, and goes on from there.

    Microbatches are numbered consecutively through all replicas of the plan.
    """

    step: int
    formation: int
    """Generation of the pipelines for which the step's plan was made, whose microbatches were begun and are finished."""
    done: tuple[frozenset[int], ...]
    """The microbatches that each pipeline has done; its nodes have their gradients."""

    @classmethod
    def of(cls, step: int, formation: int, done: Sequence[frozenset[int]], pipelines: Sequence[Sequence[int]]) -> Self | None:
        """Return the resumed step, or None if no microbatch counts as done. done: microbatches that each rank has gradients of.

        The microbatches of a pipeline count if all of its nodes have the same ones, and no earlier pipeline has any of them.
        """
        counted: list[frozenset[int]] = []
        for ranks in pipelines:
            said = {done[rank] if rank != NOBODY else frozenset[int]() for rank in ranks}
            own = said.pop()
            counted.append(frozenset() if said or own.intersection(chain.from_iterable(counted)) else own)
        return cls(step=step, formation=formation, done=tuple(counted)) if any(counted) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The pipelines of one membership snapshot, and the place of one process in them."""

    generation: int
    """Generation of the snapshot."""
    rank: int
    """Rank of this process: those of the snapshot's first node come first, and so on."""
    num_ranks: int
    nodes: tuple[str, ...]
    """Name of the node of each rank."""
    pipelines: tuple[tuple[int, ...], ...]
    """Ranks of each pipeline, in pipeline order; NOBODY for those of a lost node, whose pipeline's microbatches others do."""
    shares: tuple[int, ...]
    """Number of microbatches of each pipeline."""
    pipeline: int
    """Index of this node's pipeline."""
    topology: PipelineTopology
    """The topology of this node's pipeline alone: its ranks are indices of `pipelines[pipeline]`."""
    bounds: Mapping[str, tuple[int, ...]]
    """Layer bounds of each unit's stages in this node's pipeline: (0, ..., number of layers)."""
    resumed: Resumed | None = None
    """The step that pipelines have already done a part of, if any."""
    evaluates: bool = False
    """Whether plans are of an evaluation, which are made for the replicas of the topology, whatever pipelines there are."""

    @classmethod
    def of(cls, snapshot: membership_pb2.Snapshot, name: str, spec: RecoverySpec, process: int = 0) -> Self | None:
        """Return the layout of a process of the node with this name; None if the snapshot gives it no place in a pipeline."""
        names = [node.name for node in snapshot.nodes]
        if name not in names:
            return None
        per_node = spec.gpus_per_node
        rank = names.index(name) * per_node + process
        pipelines = tuple(
            tuple(NOBODY if stage.rank == NOBODY else stage.rank * per_node + stage.process for stage in pipeline.stages)
            for pipeline in snapshot.pipelines
        )
        own = next(number for number, ranks in enumerate(pipelines) if rank in ranks)
        bounds: dict[str, tuple[int, ...]] = {}
        for stage in snapshot.pipelines[own].stages:
            bounds[stage.unit] = (*bounds.get(stage.unit, (0,)), stage.end_layer)
        return cls(
            generation=snapshot.generation,
            rank=rank,
            num_ranks=len(names) * per_node,
            nodes=tuple(node for node in names for _ in range(per_node)),
            pipelines=pipelines,
            shares=tuple(pipeline.num_microbatches for pipeline in snapshot.pipelines),
            pipeline=own,
            topology=spec.pipeline(bounds),
            bounds=bounds,
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of this node's pipeline, in pipeline order; NOBODY in place of a lost node."""
        return self.pipelines[self.pipeline]

    @property
    def place(self) -> Place:
        """Place of this node in its pipeline."""
        return self.topology.place(self.ranks.index(self.rank))

    def resume(self, step: int, formation: int, done: Sequence[frozenset[int]]) -> Self:
        """Return this layout with a step to resume, if anything of it is done.

        formation: for which pipelines its plan was made. done: the step's microbatches that each rank has gradients of.
        """
        return replace(self, resumed=Resumed.of(step, formation, done, self.pipelines))

    def for_evaluation(self) -> Self:
        """Return the layout of the same pipelines in an evaluation."""
        return replace(self, resumed=None, evaluates=True)

    def formation_of(self, step: int) -> int:
        """Return the generation of the pipelines for which the plan of a step must be made: these, unless it is resumed.

        0: none, in an evaluation.
        """
        if self.evaluates:
            return 0
        return self.resumed.formation if self.resumed is not None and self.resumed.step == step else self.generation

    @property
    def keeps_share(self) -> bool:
        """Whether this node's pipeline has done a part of the resumed step."""
        return self.resumed is not None and bool(self.resumed.done[self.pipeline])

    def assigned(self, step: int, plan: StepPlan, seconds: Sequence[float]) -> tuple[Sequence[int], StepPlan]:
        """Return the numbers of the microbatches that this node's pipeline is to do in a step, and a plan of only these.

        plan: made for the pipelines of `formation_of(step)`. It is followed as it is, unless the step is resumed or of an
        evaluation. Then the microbatches still to do are dealt out (`deal`), and every sample passes all units in the microbatch
        of its loss: a sample that is deferred would cross from pipeline to pipeline.

        seconds: predicted time of each microbatch of the plan; empty where it was made for no pipelines. Raises UserError if the
        plan does not have the number of microbatches that the nodes were told.
        """
        whole = [microbatch for microbatches in plan.replicas for microbatch in microbatches]
        if len(whole) != sum(self.shares):
            raise UserError(
                f"the plan has {len(whole)} microbatches, but the nodes were told of {sum(self.shares)}: "
                "the job's topology was changed, which the nodes of a recoverable job must not see"
            )
        resumed = self.resumed if self.resumed is not None and self.resumed.step == step else None
        if resumed is None and not self.evaluates:
            first = sum(self.shares[: self.pipeline])
            numbers: Sequence[int] = range(first, first + self.shares[self.pipeline])
            microbatches = [whole[number] for number in numbers]
        else:
            left = set(range(len(whole))).difference(*(resumed.done if resumed is not None else ()))
            numbers = deal(seconds or [1.0] * len(whole), self.shares, left)[self.pipeline]
            microbatches = [Microbatch(units=dict.fromkeys(plan.topology.stages, whole[number].units[LLM])) for number in numbers]
        microbatches = microbatches or [Microbatch(units=dict.fromkeys(plan.topology.stages, ()))]
        topology = Topology(replicas=1, microbatches=len(microbatches), stages=plan.topology.stages)
        return numbers, replace(plan, topology=topology, replicas=[microbatches])


def finishes_step_first(name: str, running: membership_pb2.Snapshot, newer: membership_pb2.Snapshot) -> bool:
    """Whether a node's pipeline has to finish its share of the current step before it follows a newer snapshot.

    It does if the newer snapshot reroutes the microbatches of a pipeline that lost a node, and keeps this pipeline as it is.
    """
    own = [pipeline for pipeline in _named(running) if name in (node for node, *_ in pipeline)]
    return is_rerouted(newer) and any(pipeline in _named(newer) for pipeline in own)


def _named(snapshot: membership_pb2.Snapshot) -> list[list[tuple[str, str, int, int]]]:
    """Return node name, unit, first layer and end layer of every stage of every pipeline; the name is "" for a lost node."""
    names = {rank: node.name for rank, node in enumerate(snapshot.nodes)}
    return [
        [(names.get(stage.rank, ""), stage.unit, stage.first_layer, stage.end_layer) for stage in pipeline.stages]
        for pipeline in snapshot.pipelines
    ]


def deal(seconds: Sequence[float], shares: Sequence[int], numbers: Collection[int]) -> list[list[int]]:
    """Deal microbatches to pipelines, the longest first, each to the pipeline that would finish it earliest (LPT; Graham, 1969).

    Return the microbatch numbers of each pipeline, in ascending order.

    seconds: time of each microbatch on the same pipeline; at least 2 % of the longest is assumed. shares: relative speeds of the
    pipelines, 0 for one that takes no microbatch. numbers: the microbatches to deal out.
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
