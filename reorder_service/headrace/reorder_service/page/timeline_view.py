"""When each stage, or each rank, does what in a planned step: its simulation, as the page draws it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headrace.plan import StepPlan, Topology
from headrace.reorder_service.jobs.formation import Formation
from headrace.reorder_service.jobs.job_execution import execution_of
from headrace.reorder_service.jobs.planned_step import PlannedStep
from headrace.reorder_service.page.answers import encoded
from headrace.reorder_service.page.job_views import figure
from headrace.reorder_service.planning.batch import Batch, Slots, make_batch, slots_of
from headrace.reorder_service.planning.sequence_degrees import degrees_of
from headrace.reorder_service.planning.simulation.eager_depth import planned_work
from headrace.reorder_service.planning.simulation.phase_step import AFTER_PHASES, phase_loads
from headrace.reorder_service.planning.simulation.shared_ranks import simulate_shared
from headrace.reorder_service.planning.simulation.simulator import Timeline, timeline
from headrace.reorder_service.planning.unequal_pipelines import for_pipelines, shares_of, simulated_work
from headrace.schedule import Kind
from headrace.spec import JobSpec

MOST_SIMULATED = 200_000  # actions of a step, microbatches by stages by kinds, whose simulation takes some tenths of a second
MOST_ACTIONS = 6_000  # that are shown, of the slowest replicas or ranks: half a megabyte of JSON
MOST_REPLICAS, MOST_RANKS = 4, 32

_Row = tuple[str, list[dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A plan and its simulation."""

    step: int
    plan: StepPlan
    rows_json: str | None
    """A list of rows in JSON, made once; None where the plan cannot be simulated."""
    num_replicas: int
    in_measured_seconds: bool
    """Whether the costs are corrected by what the trainers have measured; else they are estimates."""

    def is_of(self, step: PlannedStep) -> bool:
        """Whether this is the simulation of the step's present plan."""
        return self.plan is step.plan

    @classmethod
    def of(cls, step: PlannedStep, spec: JobSpec) -> Simulated:
        """Simulate a step that is planned, which may take some tenths of a second. `spec`: as the job is planned now."""
        plan, formation = step.plan, step.formation
        assert plan is not None, "only planned steps are shown"
        try:
            rows = _rows(step, plan, formation, spec)
        except ValueError:  # of a topology that the job has no more, or a schedule that waits for itself
            rows = None
        return cls(
            step=step.index,
            plan=plan,
            rows_json=None if rows is None else encoded([{"name": name, "actions": actions} for name, actions in rows]),
            num_replicas=len(plan.replicas),
            in_measured_seconds=bool(step.correction.units),
        )


def timeline_view(simulated: Simulated, *, forecast_s: float, measured_s: float) -> str:
    """Return what the page shows of a simulated step, in JSON; null where it cannot be simulated.

    forecast_s, measured_s: of the step as a whole, NaN where they are not known. Trainers measure how long actions take and not
    when they begin: there are no measured rows.
    """
    if simulated.rows_json is None:
        return "null"
    about = {
        "step": simulated.step,
        "forecast_s": figure(forecast_s),
        "measured_s": figure(measured_s),
        "measured_costs": simulated.in_measured_seconds,
        "replicas": simulated.num_replicas,
        "measured_rows": None,
    }
    return f'{encoded(about)[:-1]},"rows":{simulated.rows_json}}}'


def _rows(step: PlannedStep, plan: StepPlan, formation: Formation | None, spec: JobSpec) -> list[_Row] | None:
    topology = plan.topology
    num_actions = topology.replicas * topology.microbatches * topology.num_stages * len(Kind)
    if plan.predicted is None or not step.costs or num_actions > MOST_SIMULATED:  # the simulator knows no unequal speeds
        return None
    execution = replace(step.correction.execution(execution_of(spec, topology)), in_flight=plan.in_flight)
    batch = make_batch(
        step.sample_ids,
        step.costs,
        topology,
        plan.seed,
        execution=execution if formation is None else for_pipelines(execution),
        transfer_bytes=step.transfer_bytes or None,
    )
    batch = replace(batch, degrees=degrees_of(plan, step.sample_ids))
    slots = slots_of(plan, step.sample_ids)
    if formation is not None:
        filled = np.unique(slots[0] // topology.microbatches).tolist()
        shares = shares_of(batch, plan, formation.pipelines)
        return _slowest(
            [
                _stage_rows(timeline(simulated_work(part, of_part, shape)), shape.topology, f"pipeline {p} ")
                for p, (part, of_part, shape) in zip(filled, shares, strict=True)
            ]
        )
    if execution.colocated:
        return _slowest([[row] for row in _rank_rows(batch, slots)], MOST_RANKS)
    sharing = execution.sharing
    if sharing is None:
        actions = timeline(planned_work(batch, slots))
    else:
        actions = simulate_shared(batch, slots, sharing).timeline(topology.microbatches)
    replicas = np.unique(actions.replica).tolist()
    names = [f"replica {r} " if len(replicas) > 1 else "" for r in replicas]
    return _slowest([_stage_rows(actions, topology, name, r) for r, name in zip(replicas, names, strict=True)])


def _slowest(groups: list[list[_Row]], most: int = MOST_REPLICAS) -> list[_Row]:
    """Return the rows of the groups that end last, in their order: `most`, and MOST_ACTIONS actions unless one has more."""
    ends = [max((action["end_s"] for _, actions in rows for action in actions), default=0.0) for rows in groups]
    left, shown = MOST_ACTIONS, set[int]()
    for place in np.argsort(-np.array(ends), kind="stable")[:most].tolist():
        left -= sum(len(actions) for _, actions in groups[place])
        if shown and left < 0:
            break
        shown.add(place)
    return [row for place in sorted(shown) for row in groups[place]]


def _stage_rows(actions: Timeline, topology: Topology, prefix: str, replica: int = 0) -> list[_Row]:
    """Return a row for each stage of a replica that does something."""
    stages = [(unit, f"{unit} {i}" if number > 1 else unit) for unit, number in topology.stages.items() for i in range(number)]
    rows = []
    for stage, (unit, name) in enumerate(stages):
        here = np.flatnonzero((actions.replica == replica) & (actions.stage == stage) & (actions.end_s > actions.start_s))
        if here.size:
            columns = (actions.kind, actions.microbatch, actions.start_s, actions.end_s)
            found = zip(*(column[here].tolist() for column in columns), strict=True)
            rows.append((prefix + name, [_action(Kind(kind), k, unit, begin, end) for kind, k, begin, end in found]))
    return rows


def _rank_rows(batch: Batch, slots: Slots) -> Iterator[_Row]:
    """Yield a row for each rank with all units: forward through the units of a microbatch, and back."""
    factors, units = batch.step_factors, batch.units
    whole = phase_loads(batch, slots) if batch.execution.colocated == AFTER_PHASES else batch.loads(slots) * factors
    forward_s = whole / factors
    phases = [(Kind.FORWARD, u, forward_s[:, :, u]) for u in range(len(units))]
    phases += [(Kind.BACKWARD, u, (whole - forward_s)[:, :, u]) for u in reversed(range(len(units)))]
    now_s, found = np.zeros(len(whole)), [list[dict[str, Any]]() for _ in whole]
    for k in range(batch.topology.microbatches):
        for kind, u, seconds in phases:
            for rank in np.flatnonzero(seconds[:, k] > 0).tolist():
                begin_s = float(now_s[rank])
                found[rank].append(_action(kind, k, units[u], begin_s, begin_s + float(seconds[rank, k])))
            now_s = now_s + seconds[:, k]
            if batch.execution.colocated == AFTER_PHASES:
                now_s[:] = now_s.max()
        if batch.execution.colocated == "microbatch":
            now_s[:] = now_s.max()
    for rank, actions in enumerate(found):
        yield f"rank {rank}", actions


def _action(kind: Kind, microbatch: int, unit: str, begin_s: float, end_s: float) -> dict[str, Any]:
    assert math.isfinite(end_s), "a simulated step ends"
    return {
        "kind": kind.name.lower(),
        "microbatch": microbatch,
        "unit": unit,
        "begin_s": figure(begin_s),
        "end_s": figure(end_s),
    }
