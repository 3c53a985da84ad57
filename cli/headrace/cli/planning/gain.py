"""The simulated gain of a planning strategy, averaged over several global batches of the same data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.cli.planning.outcome import Outcome, plan_timed, time_ratio
from headrace.cli.planning.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gain:
    """Simulated figures of one planning strategy, as means over several global batches."""

    strategy: str
    chosen: tuple[str, ...]
    """Strategies that made the plans if `strategy` chose among several, sorted; otherwise empty."""
    iteration_s: float
    """Mean time of a step."""
    lower_bound_s: float
    """Mean lower bound of a step's time, which no plan can beat."""
    bubble: float
    """Share of all stages' time in which they are idle, over all batches together."""
    planning_s: float
    """Mean time of planning a step."""
    outcomes: tuple[Outcome, ...]
    """The plan of each batch and its simulation, in the order of the batches."""

    @property
    def peak_memory(self) -> float:
        """Most activations that any stage holds in any batch, in the unit of `Batch.memory`."""
        return max(float(outcome.peak_memory().max()) for outcome in self.outcomes)

    @property
    def fits(self) -> bool:
        """Whether the plans of all batches stay within the memory limit."""
        return all(outcome.fits for outcome in self.outcomes)

    @property
    def busy_s(self) -> float:
        """Mean time per step in which an average stage is not idle."""
        return self.iteration_s * (1 - self.bubble)

    def speedup_over(self, other: Gain) -> float:
        """Return how many times as fast as with the other strategy a step is on average; 1 if nothing costs anything."""
        return time_ratio(other.iteration_s, self.iteration_s)

    def speedups_over(self, other: Gain) -> list[float]:
        """Return for each batch how many times as fast as with the other strategy its step is; 1 if nothing costs anything."""
        pairs = zip(other.outcomes, self.outcomes, strict=True)
        return [time_ratio(theirs.predicted.iteration_s, ours.predicted.iteration_s) for theirs, ours in pairs]

    def typical_batch(self, other: Gain) -> int:
        """Return the index of the batch whose speed-up over the other strategy is the nearest to that of all batches."""
        mean, each = self.speedup_over(other), self.speedups_over(other)
        return min(range(len(each)), key=lambda b: abs(each[b] - mean))


def best_of(gains: Sequence[Gain]) -> Gain:
    """Return the gain with the shortest step among those within the memory limit, or among all if none is."""
    return min(gains, key=lambda gain: (not gain.fits, gain.iteration_s))


def measure(strategy: str, problems: Sequence[Problem]) -> Gain:
    """Plan and simulate one or more global batches with a strategy, and return its mean figures. Raises UserError."""
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
