"""When each stage, or each rank, does what in a step: its simulation, and as it ran, as the page draws them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.plan import StepPlan, Topology
from headrace.reorder_service.jobs.formation import Formation
from headrace.reorder_service.jobs.job_execution import execution_of
from headrace.reorder_service.jobs.planned_step import PlannedStep
from headrace.reorder_service.page.answers import encoded
from headrace.reorder_service.page.job_views import figure
from headrace.reorder_service.page.run_timeline import RunTimeline
from headrace.reorder_service.page.timeline_rows import MOST_ACTIONS, Row, action_of, rank_name, replica_name, stage_name
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
MOST_REPLICAS, MOST_RANKS = 4, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownStep:
    """A step's plan, with its simulation and how it ran, made once for all who look."""

    step: int
    plan: StepPlan
    rows_json: str | None
    """A list of rows in JSON; None where the plan cannot be simulated."""
    num_replicas: int
    in_measured_seconds: bool
    """Whether the costs are corrected by what the trainers have measured; else they are estimates."""
    has_run: bool
    """Whether all ranks had committed the step."""
    measured_rows_json: str = "null"
    aligned_by: str | None = None
    """As `RunTimeline.aligned_by`; None where there are no measured rows."""

    def is_of(self, step: PlannedStep, *, has_run: bool) -> bool:
        """Whether this is the step's present plan, and all that there is to say of how it ran."""
        return self.plan is step.plan and self.has_run == has_run

    @classmethod
    def of(cls, step: PlannedStep, spec: JobSpec, *, has_run: bool) -> ShownStep:
        """Simulate a step that is planned, which may take some tenths of a second.

        `spec`: as the job is planned now. `has_run`: whether all ranks have committed the step, and say nothing more of it.
        """
        plan, formation = step.plan, step.formation
        assert plan is not None, "only planned steps are shown"
        try:
            rows = _rows(step, plan, formation, spec)
        except ValueError:  # of a topology that the job has no more, or a schedule that waits for itself
            rows = None
        run = RunTimeline.of(step, [name for name, _ in rows]) if has_run and rows else None
        return cls(
            step=step.index,
            plan=plan,
            rows_json=None if rows is None else _encoded(rows),
            num_replicas=len(plan.replicas),
            in_measured_seconds=bool(step.correction.units),
            has_run=has_run,
            measured_rows_json="null" if run is None else _encoded(run.rows),
            aligned_by=None if run is None else run.aligned_by,
        )


def timeline_view(shown: ShownStep, *, forecast_s: float, measured_s: float) -> str:
    """Return what the page shows of a step, in JSON; null where its plan cannot be simulated.

    forecast_s, measured_s: of the step as a whole, NaN where they are not known.
    """
    if shown.rows_json is None:
        return "null"
    about = {
        "step": shown.step,
        "forecast_s": figure(forecast_s),
        "measured_s": figure(measured_s),
        "measured_costs": shown.in_measured_seconds,
        "replicas": shown.num_replicas,
        "aligned_by": shown.aligned_by,
    }
    return f'{encoded(about)[:-1]},"rows":{shown.rows_json},"measured_rows":{shown.measured_rows_json}}}'


def _encoded(rows: Sequence[Row]) -> str:
    return encoded([{"name": name, "actions": actions} for name, actions in rows])


def _rows(step: PlannedStep, plan: StepPlan, formation: Formation | None, spec: JobSpec) -> list[Row] | None:
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
                _stage_rows(timeline(simulated_work(part, of_part, shape)), shape.topology, replica_name(step, p))
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
    return _slowest([_stage_rows(actions, topology, replica_name(step, r), r) for r in np.unique(actions.replica).tolist()])


def _slowest(groups: list[list[Row]], most: int = MOST_REPLICAS) -> list[Row]:
    """Return the rows of the groups that end last, in their order: `most`, and MOST_ACTIONS actions unless one has more."""
    ends = [max((action["end_s"] for _, actions in rows for action in actions), default=0.0) for rows in groups]
    left, shown = MOST_ACTIONS, set[int]()
    for place in np.argsort(-np.array(ends), kind="stable")[:most].tolist():
        left -= sum(len(actions) for _, actions in groups[place])
        if shown and left < 0:
            break
        shown.add(place)
    return [row for place in sorted(shown) for row in groups[place]]


def _stage_rows(actions: Timeline, topology: Topology, prefix: str, replica: int = 0) -> list[Row]:
    """Return a row for each stage of a replica that does something."""
    stages = [(unit, stage_name(unit, i, number)) for unit, number in topology.stages.items() for i in range(number)]
    rows = []
    for stage, (unit, name) in enumerate(stages):
        here = np.flatnonzero((actions.replica == replica) & (actions.stage == stage) & (actions.end_s > actions.start_s))
        if here.size:
            columns = (actions.kind, actions.microbatch, actions.start_s, actions.end_s, actions.chunk)
            found = zip(*(column[here].tolist() for column in columns), strict=True)
            rows.append((prefix + name, [action_of(Kind(kind).name.lower(), k, unit, *times) for kind, k, *times in found]))
    return rows


def _rank_rows(batch: Batch, slots: Slots) -> list[Row]:
    """Return a row for each rank with all units: forward through the units of a microbatch, and back."""
    factors, units = batch.step_factors, batch.units
    whole = phase_loads(batch, slots) if batch.execution.colocated == AFTER_PHASES else batch.loads(slots) * factors
    forward_s = whole / factors
    phases = [(Kind.FORWARD, u, forward_s[:, :, u]) for u in range(len(units))]
    phases += [(Kind.BACKWARD, u, (whole - forward_s)[:, :, u]) for u in reversed(range(len(units)))]
    now_s = np.zeros(len(whole))
    rows: list[Row] = [(rank_name(rank), []) for rank in range(len(whole))]
    for k in range(batch.topology.microbatches):
        for kind, u, seconds in phases:
            for rank in np.flatnonzero(seconds[:, k] > 0).tolist():
                begin_s = float(now_s[rank])
                action = action_of(kind.name.lower(), k, units[u], begin_s, begin_s + float(seconds[rank, k]))
                rows[rank][1].append(action)
            now_s = now_s + seconds[:, k]
            if batch.execution.colocated == AFTER_PHASES:
                now_s[:] = now_s.max()
        if batch.execution.colocated == "microbatch":
            now_s[:] = now_s.max()
    return rows
