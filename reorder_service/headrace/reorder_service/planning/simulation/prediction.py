"""The predicted time of a plan's step, on whatever ranks it runs."""

from __future__ import annotations

from headrace.plan import Predicted
from headrace.reorder_service.planning.batch import Batch, Slots
from headrace.reorder_service.planning.sharing import Sharing
from headrace.reorder_service.planning.simulation.colocated_step import predict
from headrace.reorder_service.planning.simulation.eager_depth import planned_work
from headrace.reorder_service.planning.simulation.list_schedule import CELL, WIDTH
from headrace.reorder_service.planning.simulation.phase_step import AFTER_PHASES, predict_phases
from headrace.reorder_service.planning.simulation.shared_ranks import least_shared_s, simulate_shared
from headrace.reorder_service.planning.simulation.simulator import simulate


def predict_step(batch: Batch, slots: Slots) -> Predicted:
    """Simulate the step of a plan, given by its (U, n) slots, as the batch's execution says that it runs.

    Raises ValueError if the plan makes its schedule wait for itself.
    """
    if batch.execution.colocated == AFTER_PHASES:
        return predict_phases(batch, slots)
    if batch.execution.colocated:
        return predict(batch, slots)
    if batch.execution.sharing is not None:
        return _predict_shared(batch, slots, batch.execution.sharing)
    return simulate(planned_work(batch, slots))


def _predict_shared(batch: Batch, slots: Slots, sharing: Sharing) -> Predicted:
    step = simulate_shared(batch, slots, sharing)
    cell, width = step.actions[:, CELL], step.actions[:, WIDTH]
    busy_s = float(((step.end_s - step.start_s) * width).sum())
    capacity_s = int((cell + width).max(initial=0)) * step.step_s
    bubble = max(0.0, 1.0 - busy_s / capacity_s) if capacity_s > 0 else 0.0
    return Predicted(iteration_s=step.step_s, bubble=bubble, lower_bound_s=min(least_shared_s(batch, sharing), step.step_s))
