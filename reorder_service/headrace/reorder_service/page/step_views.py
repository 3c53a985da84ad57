"""What the page shows of a job's latest committed steps: a column for each figure. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.reorder_service.jobs.step_history import StepFigures
from headrace.reorder_service.page.job_views import figure


def steps_view(steps: Sequence[StepFigures]) -> dict[str, Any]:
    """Return the figures of steps that follow each other, as parallel arrays; `first_step` is None where there are none."""
    return {
        "first_step": steps[0].step if steps else None,
        "forecast_s": [figure(step.forecast_s) for step in steps],
        "measured_s": [figure(step.measured_s) for step in steps],
        "data_wait_s": [figure(step.data_wait_s) for step in steps],
        "samples": [step.samples for step in steps],
        "balance_before": [figure(step.balance.before) if step.balance else None for step in steps],
        "balance_after": [figure(step.balance.after) if step.balance else None for step in steps],
    }
