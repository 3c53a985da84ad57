"""From what the ranks have reported with their commits of a step to what its costs are corrected by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.limits import MAX_SLOTS
from headrace.measured import ALL_UNITS, MeasuredWork
from headrace.reorder_service.jobs.planned_step import PlannedStep
from headrace.reorder_service.planning.batch import Floats, slots_of
from headrace.reorder_service.planning.cost_model.correction import Line, Observation, Ranks
from headrace.reorder_service.planning.execution import Execution
from headrace.schedule import Kind


def observation(step: PlannedStep, execution: Execution) -> Observation | None:
    """Return what the trainers have measured of a committed step; None where they have measured nothing that fits its plan.

    execution: the uncorrected one of the job. Trainers that have all units say nothing about the units of a pipeline.
    """
    work = [one for commit in step.commits.values() for one in commit.measured]
    if step.plan is None or not step.estimated or not work or (work[0].unit == ALL_UNITS) != bool(execution.colocated):
        return None
    topology = step.plan.topology
    units, replicas, microbatches = tuple(topology.stages), topology.replicas, topology.microbatches
    own = {unit: len(of_unit) for unit, of_unit in step.plan.unit_replicas.items()}
    forth = slots_of(step.plan, step.sample_ids)
    back = forth - forth % microbatches + forth[-1] % microbatches  # of every unit, in the microbatch of the last one

    def estimated_s(u: int, kind: Kind) -> Floats:
        slot = (forth if kind == Kind.FORWARD else back)[u]
        of_unit = own.get(units[u], replicas)
        sums = np.bincount(slot, weights=step.estimated[units[u]], minlength=of_unit * microbatches)
        return sums.astype(np.float64, copy=False).reshape(of_unit, microbatches)

    outside_s = min(commit.outside_s for commit in step.commits.values())
    if execution.colocated:
        loads = [estimated_s(u, Kind.FORWARD) * execution.step_factor(unit) for u, unit in enumerate(units)]
        [measured_s] = _sums(work, 1, replicas, microbatches)
        ranks = Ranks(estimated_s=np.stack(loads, axis=-1), measured_s=np.where(measured_s > 0, measured_s, np.nan))
        return Observation(ranks=ranks, outside_s=outside_s)
    lines = {
        (unit, kind): _line(of_kind, estimated_s(u, kind), step.plan.topology.stages[unit])
        for u, unit in enumerate(units)
        for kind in Kind
        if (of_kind := [one for one in work if (one.unit, one.kind) == (unit, kind)])
    }
    return Observation(units=lines, outside_s=outside_s)


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
