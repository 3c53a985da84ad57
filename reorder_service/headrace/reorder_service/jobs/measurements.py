"""From what the ranks have reported with their commits of a step to what its costs are corrected by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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
    units, shape = tuple(step.plan.topology.stages), (step.plan.topology.replicas, step.plan.topology.microbatches)
    forth = slots_of(step.plan, step.sample_ids)
    back = forth - forth % shape[1] + forth[-1] % shape[1]  # of every unit, in the microbatch of the last one

    def estimated_s(u: int, kind: Kind) -> Floats:
        slot = (forth if kind == Kind.FORWARD else back)[u]
        return np.bincount(slot, weights=step.estimated[units[u]], minlength=shape[0] * shape[1]).reshape(shape)

    outside_s = min(commit.outside_s for commit in step.commits.values())
    if execution.colocated:
        loads = [estimated_s(u, Kind.FORWARD) * (1.0 + execution.backward_factor(unit)) for u, unit in enumerate(units)]
        measured_s, actions = _sums(work, *shape)
        ranks = Ranks(estimated_s=np.stack(loads, axis=-1), measured_s=np.where(actions > 0, measured_s, np.nan))
        return Observation(ranks=ranks, outside_s=outside_s)
    lines = {
        (unit, kind): _line(of_kind, estimated_s(u, kind))
        for u, unit in enumerate(units)
        for kind in Kind
        if (of_kind := [one for one in work if (one.unit, one.kind) == (unit, kind)])
    }
    return Observation(units=lines, outside_s=outside_s)


def _line(work: Sequence[MeasuredWork], estimated_s: Floats) -> Line:
    """Join the measured seconds of a unit's actions of one kind with the (D, K) estimated ones.

    Where the unit has not as many replicas as the plan, whose samples are then dealt out anew, microbatches of one index are
    added up.
    """
    replicas = 1 + max(one.replica for one in work)
    measured_s, actions = _sums(work, replicas, estimated_s.shape[1])
    if replicas != len(estimated_s):
        measured_s, actions, estimated_s = (each.sum(axis=0) for each in (measured_s, actions, estimated_s))
    taken = actions > 0
    return Line(estimated_s=estimated_s[taken], actions=actions[taken], measured_s=measured_s[taken])


def _sums(work: Sequence[MeasuredWork], replicas: int, microbatches: int) -> tuple[Floats, Floats]:
    """Return the (replicas, microbatches) measured seconds of all stages together, and how often there was anything to do."""
    seconds = np.zeros((replicas, microbatches))
    stages = sorted({one.stage for one in work})
    actions = np.zeros((len(stages), replicas, microbatches))
    for one in work:
        if one.replica < replicas:
            inside = np.array(one.microbatches) < microbatches
            at = np.array(one.microbatches)[inside]
            seconds[one.replica, at] += np.array(one.seconds)[inside]
            actions[stages.index(one.stage), one.replica, at] = 1
    return seconds, actions.max(axis=0)
