"""Snapshots of the pipelines that a job's nodes form: turns messages into input for reorder_service.recovery, and back.

Pure: no stream, no store, no clock. Each GPU of a node is a process here, with a stage to itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np

from headrace.errors import UnrecoverableError, UserError
from headrace.limits import MAX_GPUS_PER_NODE, MAX_LAYERS, MAX_NODES, MAX_RECOVERABLE_MICROBATCHES
from headrace.plan import Topology
from headrace.reorder_service.jobs.formation import Formation
from headrace.reorder_service.planning.batch import Floats, make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.unequal_pipelines import PipelineShape, plan_for_pipelines
from headrace.reorder_service.recovery.instantiation import distribute, instantiate
from headrace.reorder_service.recovery.pipeline_templates import ModelProfile, Stage, Templates, plan_templates
from headrace.reorder_service.recovery.reconfiguration import Pipeline
from headrace.reorder_service.recovery.recovery_choice import Circumstances, OnLoss, choose, iteration_time
from headrace.snapshot import NOBODY, processes_of, size_in_words
from headrace.v1 import membership_pb2
from headrace.v1.membership_pb2 import Snapshot

_LOST = "a lost node"  # stands for its name, which a snapshot does not keep


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What happened to the nodes since the newest snapshot; the next one takes it in."""

    lost: frozenset[str] = frozenset()
    """Nodes of that snapshot that the next one leaves out."""
    leaving: frozenset[str] = frozenset()
    """Those of the `lost` nodes that are still connected: they have announced that they leave."""
    joined: Mapping[str, str]
    """Name -> address of each connected node that is not in that snapshot."""
    at_step_end: bool
    """Whether the next snapshot holds from the end of a step on, since no node was lost or cut off without notice."""
    in_step: bool = False
    """Whether nodes were lost while the others are in the middle of a step under that snapshot."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Successor:
    """The snapshot after a change, and what it costs and leaves unused."""

    snapshot: Snapshot
    copied_bytes: int = 0
    idle: frozenset[str] = frozenset()
    """Connected nodes that no pipeline can use."""


def templates_of(spec: membership_pb2.NodesSpec) -> Templates:
    """Plan a pipeline template for every number of nodes that a pipeline of the job may ever have.

    Raises UserError where the specification is invalid or too large, or the nodes are too few for it.
    """
    profile = spec.profile
    num_layers = sum(unit.num_layers for unit in profile.units)
    for number, limit, what in (
        (spec.num_nodes, MAX_NODES, "nodes"),
        (spec.num_microbatches, MAX_RECOVERABLE_MICROBATCHES, "microbatches"),
        (num_layers, MAX_LAYERS, "layers"),
        (spec.gpus_per_node, MAX_GPUS_PER_NODE, "GPUs of a node"),
    ):
        if number > limit:
            raise UserError(f"{number} {what} are more than the {limit} that pipelines are planned for: give fewer")
    if spec.on_loss and spec.on_loss not in set(OnLoss):
        raise UserError(f"on_loss {spec.on_loss!r} is none of {', '.join(OnLoss)}")
    if spec.gpus_per_node < 0:
        raise UserError(f"nodes of {spec.gpus_per_node} GPUs are none: give gpus_per_node as at least 1")
    if spec.num_nodes < 1 or spec.max_failures < 0 or spec.num_microbatches <= spec.max_failures:
        raise UserError(
            f"{spec.num_nodes} nodes that outlast {spec.max_failures} failures with {spec.num_microbatches} microbatches are "
            "none: there must be a node and a microbatch for each of the replicas, one more than failures"
        )
    try:
        model = ModelProfile(
            units={unit.unit: unit.num_layers for unit in profile.units},
            seconds=np.array(profile.seconds, np.float64).reshape(-1, 1),
            gpu_bytes=np.array(profile.layer_bytes, np.int64).reshape(-1, 1),
            memory_bytes=profile.memory_bytes,
            gpus_per_node=processes_of(spec),
        )
    except ValueError as err:
        raise UserError(f"the profile of the nodes' model does not fit together: {err}") from err
    return plan_templates(model, spec.num_nodes, spec.max_failures)


def next_snapshot(
    spec: membership_pb2.NodesSpec, templates: Templates, former: Snapshot, change: Change, *, step_s: float = 0.0
) -> Successor:
    """Return the snapshot after a change. Where `former` has no pipelines, the first nodes that joined form the first ones.

    Where training cannot go on, the snapshot has an `error` and no pipelines.

    step_s: measured seconds of a step, needed since the profile's seconds are in no known unit of time; 0: not measured yet.

    Raises UserError where the nodes can never form pipelines.
    """
    generation = former.generation + 1
    snapshot = Snapshot(
        generation=generation,
        at_step_end=change.at_step_end,
        change=change.text,
        urgent=former.urgent if change.at_step_end else generation,
    )
    copied_bytes, idle = 0, frozenset[str]()
    if former.pipelines:
        before = _pipelines(templates, former)
        try:
            choice = choose(
                templates,
                before,
                Circumstances(),
                lost=change.lost | {_LOST},
                joined=tuple(change.joined),
                num_microbatches=spec.num_microbatches,
                units_per_second=iteration_time(before, spec.num_microbatches) / step_s if step_s else 0.0,
                on_loss=OnLoss(spec.on_loss or OnLoss.AUTO) if change.in_step else OnLoss.REBUILD,
            )
        except UnrecoverableError as err:
            snapshot.error = str(err)
            gone = change.lost - change.leaving
            snapshot.nodes.extend(node for node in former.nodes if node.name not in gone)  # they can still save what they hold
            return Successor(snapshot=snapshot)
        after, snapshot.choice = choice.option.after, choice.text
        if choice.rerouting_s is not None:
            _reroute(snapshot, spec, before, former, change.lost)
            return Successor(snapshot=snapshot, idle=frozenset(change.joined))
        pipelines, copied_bytes, idle = after.pipelines, after.copied_bytes, frozenset(after.idle)
    else:
        start = instantiate(templates, spec.num_nodes, spec.num_microbatches, 1)
        names = iter(change.joined)
        pipelines = tuple(
            Pipeline(template=template, nodes=tuple(next(names) for _ in range(template.num_nodes)))
            for template in start.templates
        )
        spare = templates.specification.say_spare(sum(len(pipeline.nodes) for pipeline in pipelines))
        snapshot.change = "; ".join(filter(None, [change.text, spare]))
    addresses = {node.name: node.address for node in former.nodes} | dict(change.joined)
    used = set(chain.from_iterable(pipeline.nodes for pipeline in pipelines))
    in_order = [node.name for node in former.nodes if node.name not in change.lost] + list(change.joined)
    nodes = [name for name in in_order if name in used]
    snapshot.nodes.extend(membership_pb2.Node(name=name, address=addresses[name]) for name in nodes)
    snapshot.pipelines.extend(_messages(pipelines, spec, {name: rank for rank, name in enumerate(nodes)}))
    return Successor(snapshot=snapshot, copied_bytes=copied_bytes, idle=idle)


def _reroute(
    snapshot: Snapshot,
    spec: membership_pb2.NodesSpec,
    before: Sequence[Pipeline],
    former: Snapshot,
    lost: Collection[str],
) -> None:
    """Fill in a snapshot that keeps all pipelines, and has the whole ones do all microbatches.

    The remaining nodes of broken pipelines stay in it, so that they get the gradients and keep their layers current.
    """
    snapshot.nodes.extend(node for node in former.nodes if node.name not in lost)
    ranks = {node.name: rank for rank, node in enumerate(snapshot.nodes)}
    is_whole = [all(node in ranks for node in pipeline.nodes) for pipeline in before]
    counts = iter(
        distribute([pipeline.template for pipeline, is_it in zip(before, is_whole, strict=True) if is_it], spec.num_microbatches)
    )
    for pipeline, message, is_it in zip(before, former.pipelines, is_whole, strict=True):
        copied = snapshot.pipelines.add(stages=message.stages, num_microbatches=next(counts) if is_it else 0)
        for planned, stage in zip(pipeline.template.stages, copied.stages, strict=True):
            stage.rank = ranks.get(pipeline.nodes[planned.node], NOBODY)


def job_formation(formation: membership_pb2.Formation, profile: membership_pb2.ModelProfile) -> Formation:
    """Return what the planner needs to know of a formation. profile: of the nodes' model, whose layers the stages have."""
    return Formation(
        generation=formation.generation,
        first_step=formation.first_step,
        pipelines=tuple(_pipeline_shape(pipeline, profile) for pipeline in formation.pipelines),
    )


def _pipeline_shape(pipeline: membership_pb2.Pipeline, profile: membership_pb2.ModelProfile) -> PipelineShape:
    ends = list(accumulate(unit.num_layers for unit in profile.units))
    stages: dict[str, tuple[float, ...]] = {}
    for unit, end in zip(profile.units, ends, strict=True):
        seconds = profile.seconds[end - unit.num_layers : end]
        if not sum(seconds):  # a unit that takes no time: all layers count alike
            seconds = [1.0] * unit.num_layers
        own = [stage for stage in pipeline.stages if stage.unit == unit.unit]
        stages[unit.unit] = tuple(sum(seconds[stage.first_layer : stage.end_layer]) / sum(seconds) for stage in own)
    return PipelineShape(stages=stages, microbatches=pipeline.num_microbatches)


def shape(snapshot: Snapshot) -> str:
    """Return the number of nodes in each pipeline, as in "3+2+(1)"; brackets mark a pipeline that lacks a node."""
    return "+".join(map(size_in_words, snapshot.pipelines))


def warm_up() -> None:
    """Compile what a membership needs, or load it from numba's cache, so that no node waits for that later."""
    units = [membership_pb2.UnitLayers(unit="llm", num_layers=4)]
    profile = membership_pb2.ModelProfile(units=units, seconds=[1.0] * 4, layer_bytes=[1] * 4, memory_bytes=4)
    spec = membership_pb2.NodesSpec(num_nodes=4, max_failures=1, num_microbatches=4, profile=profile)
    joined = {f"node-{rank}": "" for rank in range(4)}
    templates = templates_of(spec)
    first = next_snapshot(spec, templates, Snapshot(), Change(joined=joined, at_step_end=True, text="")).snapshot
    lost = Change(lost=frozenset({"node-3"}), joined={}, at_step_end=False, text="")
    next_snapshot(spec, templates, first, lost, step_s=1.0)
    topology = Topology(replicas=2, microbatches=2, stages={"llm": 1})
    batch = make_batch(np.arange(4), {"llm": np.arange(1.0, 5.0)}, topology, seed=0)
    shapes = [PipelineShape(stages={"llm": stages}, microbatches=2) for stages in ((1.0,), (0.5, 0.5))]
    plan_for_pipelines("random", batch, shapes)


def _pipelines(templates: Templates, snapshot: Snapshot) -> list[Pipeline]:
    names = {rank: node.name for rank, node in enumerate(snapshot.nodes)}
    return [
        Pipeline(
            template=templates.of_size[sum(stage.process == 0 for stage in pipeline.stages)],
            nodes=tuple(names.get(stage.rank, _LOST) for stage in pipeline.stages if stage.process == 0),
        )
        for pipeline in snapshot.pipelines
    ]


def _messages(
    pipelines: Sequence[Pipeline], spec: membership_pb2.NodesSpec, ranks: Mapping[str, int]
) -> list[membership_pb2.Pipeline]:
    counts = distribute([pipeline.template for pipeline in pipelines], spec.num_microbatches)
    ends = accumulate(unit.num_layers for unit in spec.profile.units)
    starts = {unit.unit: end - unit.num_layers for unit, end in zip(spec.profile.units, ends, strict=True)}
    return [
        membership_pb2.Pipeline(
            stages=[_stage(stage, starts[stage.unit], ranks[pipeline.nodes[stage.node]]) for stage in pipeline.template.stages],
            num_microbatches=count,
        )
        for pipeline, count in zip(pipelines, counts, strict=True)
    ]


def _stage(stage: Stage, start: int, rank: int) -> membership_pb2.PipelineStage:
    """Build the message of one stage. `start`: index of the unit's first layer within the whole model."""
    return membership_pb2.PipelineStage(
        rank=rank,
        process=stage.gpu,
        unit=stage.unit,
        first_layer=stage.layers.start - start,
        end_layer=stage.layers.stop - start,
    )


def mean_microbatch(costs: Sequence[Mapping[str, Floats]], execution: Execution, topology: Topology) -> dict[str, float]:
    """Return the seconds, forward and backward, that a mean microbatch takes in each unit.

    costs: of one or more global batches, by unit (n,) forward seconds of the samples.
    """
    count = len(costs) * topology.replicas * topology.microbatches
    return {
        unit: sum(float(of_batch[unit].sum()) for of_batch in costs) * execution.step_factor(unit) / count for unit in costs[0]
    }
