"""From what the ranks have reported with their commits of a step to what its costs are corrected by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headrace.limits import MAX_SLOTS
from headrace.measured import ALL_UNITS, MeasuredWork
from headrace.reorder_service.jobs.planned_step import PlannedStep
from headrace.reorder_service.planning.batch import Floats, make_batch, slots_of
from headrace.reorder_service.planning.cost_model.correction import Correction, Line, Observation, Ranks
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.simulation.prediction import predict_step
from headrace.reorder_service.planning.unequal_pipelines import for_pipelines, pipelines_s
from headrace.schedule import Kind


def observation(step: PlannedStep, execution: Execution) -> Observation | None:
    """Return what the trainers have measured of a committed step; None where they have measured nothing that fits its plan.

    execution: the uncorrected one of the job. Trainers that have all units say nothing about the units of a pipeline.
    """
    work = [one for commit in step.commits.values() for one in commit.measured]
    if (
        step.plan is None
        or not step.estimated
        or math.isnan(step.measured_s)
        or not work
        or (work[0].unit == ALL_UNITS) != bool(execution.colocated)
    ):
        return None
    topology, formation = step.plan.topology, step.formation
    units, replicas, microbatches = tuple(topology.stages), topology.replicas, topology.microbatches
    stages = topology.stages
    if formation is not None:
        stages = {unit: max(len(pipeline.stages[unit]) for pipeline in formation.pipelines) for unit in units}
    own = {unit: len(of_unit) for unit, of_unit in step.plan.unit_replicas.items()}
    forth = slots_of(step.plan, step.sample_ids)
    back = forth - forth % microbatches + forth[-1] % microbatches  # of every unit, in the microbatch of the last one

    def estimated_s(u: int, kind: Kind) -> Floats:
        slot = (forth if kind == Kind.FORWARD else back)[u]
        of_unit = own.get(units[u], replicas)
        sums = np.bincount(slot, weights=step.estimated[units[u]], minlength=of_unit * microbatches)
        return sums.astype(np.float64, copy=False).reshape(of_unit, microbatches)

    if execution.colocated:
        loads = [estimated_s(u, Kind.FORWARD) * execution.step_factor(unit) for u, unit in enumerate(units)]
        [measured_s] = _sums(work, 1, replicas, microbatches)
        ranks = Ranks(estimated_s=np.stack(loads, axis=-1), measured_s=np.where(measured_s > 0, measured_s, np.nan))
        return Observation(ranks=ranks)
    lines = {
        (unit, kind): line if formation is None else replace(line, stage_s=line.stage_s.sum(keepdims=True))
        for u, unit in enumerate(units)
        for kind in Kind
        if (of_kind := [one for one in work if (one.unit, one.kind) == (unit, kind)])
        for line in [_line(of_kind, estimated_s(u, kind), stages[unit])]
    }
    return Observation(units=lines)


def unexplained_s(step: PlannedStep, correction: Correction, execution: Execution) -> float:
    """Return by how many seconds a measured step took longer than its plan takes with corrected costs.

    That is the time of the optimizer, of messages, and of waiting for each other where computations vary from step to step.

    execution: the uncorrected one of the job.
    """
    assert step.plan is not None, "a measured step was planned"
    formation, as_run = step.formation, replace(correction.execution(execution), in_flight=step.plan.in_flight)
    batch = make_batch(
        step.sample_ids,
        correction.seconds(step.estimated),
        step.plan.topology,
        step.plan.seed,
        execution=as_run if formation is None else for_pipelines(as_run),
        transfer_bytes=step.transfer_bytes or None,
    )
    if formation is not None:
        return step.measured_s - pipelines_s(batch, step.plan, formation.pipelines)
    slots = slots_of(step.plan, step.sample_ids)
    return step.measured_s - predict_step(batch, slots).iteration_s


def _line(work: Sequence[MeasuredWork], estimated_s: Floats, stages: int) -> Line:
    """Join the measured seconds of a unit's actions of one kind with the (D, K) estimated ones.

    Where the unit has another number of replicas than the plan says, whose samples trainers cut by number, microbatches of one
    index are added up.
    """
    most = MAX_SLOTS // (stages * estimated_s.shape[1])  # of what a rank says, so that it cannot ask for any amount of memory
    replicas = min(most, max(0, 1 + max(one.replica for one in work)))
    of_stages = _sums(work, stages, replicas, estimated_s.shape[1])
    measured_s = _over_first(of_stages)
    actions: Floats = np.asarray(np.any(of_stages > 0, axis=0), np.float64)
    if replicas != len(estimated_s):
        measured_s, actions, estimated_s = _over_first(measured_s), _over_first(actions), _over_first(estimated_s)
    taken = actions > 0
    return Line(
        estimated_s=estimated_s[taken],
        actions=actions[taken],
        measured_s=measured_s[taken],
        stage_s=np.array([float(of_stage.sum()) for of_stage in of_stages]),
    )


def _sums(work: Sequence[MeasuredWork], stages: int, replicas: int, microbatches: int) -> Floats:
    """Return the (stages, replicas, microbatches) measured seconds; what lies outside of these is left out."""
    seconds = np.zeros((stages, replicas, microbatches))
    for one in work:
        if 0 <= one.stage < stages and 0 <= one.replica < replicas:
            at, values = np.array(one.microbatches, np.int64), np.array(one.seconds)
            inside = (at >= 0) & (at < microbatches) & np.isfinite(values) & (values > 0)
            np.add.at(seconds, (one.stage, one.replica, at[inside]), values[inside])
    return seconds


def _over_first(values: Floats) -> Floats:
    """Return the sums over the first axis."""
    sums: Floats = np.add.reduce(values, axis=0)
    return sums
