"""Evaluation of a job's validation sets by Headrace's own trainer: when, and what is said of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from headrace.errors import UserError
from headrace.observability.logs import pairs
from headrace.spec import JobSpec
from headrace.trainer.rank_progress import PROGRESS
from headrace.trainer.train_step import as_logged

log = logging.getLogger(__name__)

Evaluate = Callable[[str], tuple[float, float]]
"""Evaluates a validation set by its name, and returns loss sum and weight of targets over all ranks, which all call it."""


def check_sets(spec: JobSpec, every: int | None) -> None:
    """Raise UserError where evaluations are asked for (`every` is not None), but the job has no validation set."""
    if every is not None and not spec.validation:
        raise UserError(
            f"evaluations every {every} steps are asked for, but job {spec.name!r} has no validation set: name one in "
            "`validation:` of its spec"
        )


class Evaluations:
    """Evaluates all validation sets of a job before the first step, after every so many steps, and after the last one.

    The evaluation before the first step finds a set that cannot be read before anything is trained.
    """

    def __init__(self, spec: JobSpec, every: int | None, run: Evaluate) -> None:
        """`every`: steps between two evaluations; None: there are none.

        Raises UserError where the job has no validation set to evaluate.
        """
        check_sets(spec, every)
        self._job, self._sets, self._every, self._run = spec.name, tuple(spec.validation), every, run
        self._evaluated: int | None = None  # number of steps before the last evaluation
        self._steps: int | None = None  # number of steps that are trained; None before the first one

    def begin(self, steps: int) -> None:
        """Evaluate before a process's first step, with so many steps before it."""
        self._evaluate(steps)

    def after(self, steps: int) -> None:
        """Note that so many steps are trained, and evaluate if it is time."""
        self._steps = steps
        if self._every and steps % self._every == 0:
            self._evaluate(steps)

    def end(self) -> None:
        """Evaluate behind the last step, unless that was done."""
        if self._steps is not None and self._steps != self._evaluated:
            self._evaluate(self._steps)

    def _evaluate(self, steps: int) -> None:
        if self._every is None:
            return
        self._evaluated = steps
        for name in self._sets:
            PROGRESS.begin(f"evaluates {name}")
            loss_sum, target_weight = self._run(name)
            loss = loss_sum / target_weight if target_weight else math.nan
            targets = as_logged(target_weight)
            log.info("evaluated %s", pairs(job=self._job, set=name, after_steps=steps, loss=loss, targets=targets))
        PROGRESS.excuse("waits for the next step")
