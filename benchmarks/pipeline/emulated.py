"""One emulated step beside its prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from headrace.cli.planning.emulated_ranks import MeasuredStep
from headrace.cli.planning.outcome import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulated:
    """One step of a strategy and a schedule."""

    outcome: Outcome
    rounds: Sequence[MeasuredStep]

    @property
    def predicted_s(self) -> float:
        return self.outcome.predicted.iteration_s

    @property
    def error_percent(self) -> float:
        """Of the prediction, without sign."""
        return 100 * abs(self.measured_s / self.predicted_s - 1)

    @property
    def measured_s(self) -> float:
        """The median of the rounds."""
        return median(measured.iteration_s for measured in self.rounds)
