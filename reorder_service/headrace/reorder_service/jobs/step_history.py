"""The figures of a job's latest committed steps, kept in memory for those who look: a leader begins with none."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

from headrace.reorder_service.jobs.planned_step import PlannedStep
from headrace.reorder_service.jobs.step_balance import Balance
from headrace.reorder_service.store.progress import StepRecord

KEPT_STEPS = 1_000  # some 200 kB a job


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """What is kept of a committed step. Times are in seconds; NaN where they are not known."""

    step: int
    forecast_s: float
    measured_s: float
    """On the slowest rank, without waiting for data."""
    data_wait_s: float
    samples: int
    balance: Balance | None


class StepHistory:
    """The figures of the latest steps without a gap, KEPT_STEPS at most."""

    def __init__(self) -> None:
        self._steps: deque[StepFigures] = deque(maxlen=KEPT_STEPS)
        self._balances: dict[int, Balance | None] = {}

    def note_plan(self, step: int, balance: Balance | None) -> None:
        """Note the balance of the plan of a step that is to be committed; a later one of the same step replaces it."""
        self._balances[step] = balance

    def add(self, step: PlannedStep, record: StepRecord) -> None:
        """Add a step that is committed, with its record in the ledger."""
        if self._steps and self._steps[-1].step + 1 != step.index:
            self._steps.clear()
        self._steps.append(
            StepFigures(
                step=step.index,
                forecast_s=step.forecast_s,
                measured_s=step.measured_s,
                data_wait_s=record.data_wait_s if record.step_s > 0 else float("nan"),
                samples=len(record.samples) + len(record.substitutes),
                balance=self._balances.get(step.index),
            )
        )
        self._balances = {index: balance for index, balance in self._balances.items() if index > step.index}

    def cut(self, step: int) -> None:
        """Forget `step` and all later ones, whose commits are undone."""
        while self._steps and self._steps[-1].step >= step:
            self._steps.pop()

    def latest(self, count: int) -> list[StepFigures]:
        """Return the figures of the latest steps, at most so many, in order."""
        return list(itertools.islice(self._steps, max(0, len(self._steps) - count), None))
