"""What one strategy makes of several global batches of the same data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cli.outcome import Outcome, plan_timed
from cli.planning_options import Problem


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
    first: Outcome
    """Of the first batch."""

    @property
    def busy_s(self) -> float:
        """Time of a step in which an average stage works."""
        return self.iteration_s * (1 - self.bubble)

    def speedup_over(self, other: Gain) -> float:
        """How many times as fast; 1 where nothing costs anything."""
        return other.iteration_s / self.iteration_s if self.iteration_s > 0 else 1.0


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
        first=outcomes[0],
    )
