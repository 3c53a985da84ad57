"""What one strategy makes of several global batches of the same data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.cli.planning.outcome import Outcome, plan_timed
from headrace.cli.planning.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gain:
    """Means over global batches."""

    strategy: str
    chosen: tuple[str, ...]
    """Strategies that made the plans, where `strategy` chose among several; sorted."""
    iteration_s: float
    """Time of a step."""
    lower_bound_s: float
    """No plan makes it faster."""
    bubble: float
    """Share of all stages' time in which they are idle."""
    planning_s: float
    outcomes: tuple[Outcome, ...]
    """Of the batches, in order."""

    @property
    def peak_memory(self) -> float:
        """Of the fullest stage in any batch."""
        return max(float(outcome.peak_memory().max()) for outcome in self.outcomes)

    @property
    def fits(self) -> bool:
        """Whether every batch keeps the memory limit."""
        return all(outcome.fits for outcome in self.outcomes)

    @property
    def busy_s(self) -> float:
        """Time of a step in which an average stage works."""
        return self.iteration_s * (1 - self.bubble)

    def speedup_over(self, other: Gain) -> float:
        """How many times as fast; 1 where nothing costs anything."""
        return _ratio(other.iteration_s, self.iteration_s)

    def speedups_over(self, other: Gain) -> list[float]:
        """The same of each batch."""
        pairs = zip(other.outcomes, self.outcomes, strict=True)
        return [_ratio(theirs.predicted.iteration_s, ours.predicted.iteration_s) for theirs, ours in pairs]

    def typical_batch(self, other: Gain) -> int:
        """Index of the batch whose speed-up over the other is the nearest to that of all batches."""
        mean, each = self.speedup_over(other), self.speedups_over(other)
        return min(range(len(each)), key=lambda b: abs(each[b] - mean))


def best_of(gains: Sequence[Gain]) -> Gain:
    """The fastest of those that keep the memory limit, or of all if none does."""
    return min(gains, key=lambda gain: (not gain.fits, gain.iteration_s))


def measure(strategy: str, problems: Sequence[Problem]) -> Gain:
    """Plan and simulate at least one batch. Raises UserError."""
    outcomes, planning_s = [], 0.0
    for problem in problems:
        plan, seconds = plan_timed(problem.batch, strategy)
        outcomes.append(Outcome.of(plan, problem.batch))
        planning_s += seconds
    total = sum(outcome.predicted.iteration_s for outcome in outcomes)
    idle = sum(outcome.predicted.iteration_s * outcome.predicted.bubble for outcome in outcomes)
    return Gain(
        strategy=strategy,
        chosen=tuple(sorted({outcome.plan.chosen for outcome in outcomes} - {""})),
        iteration_s=total / len(problems),
        lower_bound_s=sum(outcome.predicted.lower_bound_s for outcome in outcomes) / len(problems),
        bubble=idle / total if total > 0 else 0.0,
        planning_s=planning_s / len(problems),
        outcomes=tuple(outcomes),
    )


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0 else 1.0
