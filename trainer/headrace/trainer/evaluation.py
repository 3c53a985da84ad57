"""Evaluation of a job's validation sets by Headrace's own trainer: when, and what is said of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headrace.errors import UserError
from headrace.observability.logs import pairs
from headrace.spec import JobSpec
from headrace.trainer.rank_progress import PROGRESS

log = logging.getLogger(__name__)

MeanLoss = tuple[float, int]
"""Loss sum and number of targets, over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """Evaluates all validation sets of a job before the first step, after every so many steps, and after the last one.

    The evaluation before the first step finds a set that cannot be read before anything is trained.
    """

    job: str
    sets: tuple[str, ...]
    every: int
    """Steps between two evaluations; 0: never."""
    run: Callable[[str], MeanLoss]
    """Evaluates a set. All ranks call it."""

    @classmethod
    def of(cls, spec: JobSpec, every: int | None, run: Callable[[str], MeanLoss]) -> Evaluations:
        """Return those of a job. `every`: None: none. Raises UserError where the job has no validation set to evaluate."""
        if every is not None and not spec.validation:
            raise UserError(
                f"evaluations each {every} steps are asked for, but job {spec.name!r} has no validation set: name one in "
                "`validation:` of its spec"
            )
        return cls(job=spec.name, sets=tuple(spec.validation), every=every or 0, run=run)

    def begin(self, step: int) -> None:
        """Evaluate before a process's first step."""
        self._evaluate(step)

    def after(self, steps: int, *, is_last: bool = False) -> None:
        """Evaluate after so many steps, if it is time; `is_last`: no step follows."""
        if self.every and (steps % self.every == 0) != is_last:  # not twice where the last step was evaluated already
            self._evaluate(steps)

    def _evaluate(self, steps: int) -> None:
        if not self.every:
            return
        for name in self.sets:
            PROGRESS.begin(f"evaluates {name}")
            loss_sum, num_targets = self.run(name)
            loss = loss_sum / num_targets if num_targets else math.nan
            log.info("evaluated %s", pairs(job=self.job, set=name, after_steps=steps, loss=loss, targets=num_targets))
        PROGRESS.excuse("waits for the next step")


def summed(losses: Iterable[MeanLoss]) -> MeanLoss:
    """Return the sums of loss sums and of numbers of targets."""
    loss_sum, num_targets = 0.0, 0
    for loss, targets in losses:
        loss_sum, num_targets = loss_sum + loss, num_targets + targets
    return loss_sum, num_targets
