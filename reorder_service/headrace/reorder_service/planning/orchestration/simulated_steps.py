"""What candidates take on the judge's batches: each batch is planned and simulated once with a strategy, however many rounds of
the search look at it, and candidates that are behind are not judged to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.orchestration.candidate import Candidate
from headrace.reorder_service.planning.orchestration.demand import Demand
from headrace.reorder_service.planning.orchestration.estimate import update_s
from headrace.reorder_service.planning.orchestration.judge import Simulated, judgement_of, keeps_within, simulated
from headrace.reorder_service.planning.orchestration.judgement import Judgement
from headrace.schedule import EAGER

_SLACK = 1.05
"""How far behind by few batches a candidate may be that is judged by more: batches differ."""
_ESTIMATED = 1.15
"""How far behind by its estimate a candidate may be that is judged: steps of real samples take as long as those of mean ones, or
longer, unless small microbatches fill and drain the pipeline."""
OF_PLACEMENT = 3
"""Candidates of each placement that stay in the search at least, so that the best of each is known: more than one, as batches
differ."""


Mapped = Callable[[Callable[[int], Simulated], Iterable[int]], Iterable[Simulated]]
"""What calls a function with each of some numbers, like `map`, or at the same time in several threads."""


class SimulatedSteps:
    """The steps of candidates on the global batches of a demand, given as (b, B) rows of its samples.

    mapped: simulates several batches of a candidate; they do not depend on each other.
    """

    def __init__(self, demand: Demand, batches: Ints, seed: int, mapped: Mapped = map) -> None:
        self.demand, self.batches = demand, batches
        self.num_simulated = 0
        """How many were planned and simulated."""
        self._seed, self._mapped = seed, mapped
        self._known: dict[tuple[str, str, int, bool], tuple[Simulated, bool]] = {}

    @property
    def layouts(self) -> frozenset[str]:
        """Of the candidates that any step is known of."""
        return frozenset(layout for layout, *_ in self._known)

    def judged(
        self, candidate: Candidate, indices: Sequence[int], strategy: str, *, quick: bool = False, is_apart: bool = True
    ) -> Judgement:
        """Judge a candidate by the batches with these indices, as `judge.judge` does. Raises ValueError as that does.

        is_apart: whether the time is taken apart, unless it is judged quickly.
        """
        steps = self._steps(candidate, indices, strategy, quick=quick)
        rows = self.batches[list(indices)]
        return judgement_of(self.demand, candidate, rows, steps, strategy, is_apart=is_apart and not quick)

    def judged_within(self, candidate: Candidate, strategy: str, limits_s: Floats) -> Judgement | None:
        """Judge a candidate quickly by the first b batches, or return None as soon as it exceeds a limit.

        limits_s: (b,) of the mean of the first batch, the first two, and so on.
        """
        indices, taken_s, behind_s = range(limits_s.size), 0.0, update_s(self.demand, candidate)
        for index in indices:
            taken_s += self._steps(candidate, [index], strategy, quick=True)[0].step_s + behind_s
            if taken_s / (index + 1) > limits_s[index]:
                return None
        return self.judged(candidate, indices, strategy, quick=True)

    def forget_all_but(self, candidates: Iterable[Candidate]) -> None:
        """Forget the steps of other candidates."""
        layouts = {candidate.layout for candidate in candidates}
        self._known = {key: step for key, step in self._known.items() if key[0] in layouts}

    def _steps(self, candidate: Candidate, indices: Sequence[int], strategy: str, *, quick: bool) -> list[Simulated]:
        """Return the steps of some batches. A quick one is as good as any other where it would not be planned with more care."""
        colocated, eager, shares = (
            candidate.placement == "colocated",
            self.demand.schedule == EAGER,
            candidate.sharing is not None,
        )

        def key_of(index: int, strategy: str = strategy) -> tuple[str, str, int, bool]:
            return candidate.layout, strategy, index, colocated and quick

        def simulate(index: int) -> Simulated:
            return simulated(self.demand, candidate, self.batches[index], strategy, self._seed, quick=quick)

        known = {index: self._known[key_of(index)] for index in indices if key_of(index) in self._known}
        lacking = [index for index in indices if index not in known or not (quick or known[index][1])]
        for index, step in zip(lacking, self._mapped(simulate, lacking), strict=True):
            self.num_simulated += 1
            is_final = not quick or colocated or shares or eager or keeps_within(self.demand, candidate, step)
            self._known[key_of(index)] = known[index] = step, is_final
            if not colocated and (shares or (quick and not eager)):  # then `auto` has the plan of the strategy that it chose
                self._known.setdefault(key_of(index, step.strategy), (step, is_final))
        return [known[index][0] for index in indices]


def sorted_out(
    steps: SimulatedSteps,
    candidates: Iterable[Candidate],
    strategy: str,
    *,
    count: int,
    left: int,
    certain: Collection[str] = (),
    advance: Callable[[int], object] = int,
) -> list[Judgement]:
    """Judge candidates quickly by the first `count` batches, and return those that may be among the `left` best, the best first.

    The OF_PLACEMENT best of every placement are among them too. Those are judged first that some steps are known of, and then the
    most promising. What is behind `left` others that fit, and so many of its own placement, is not judged any further, unless its
    layout is one of `certain`; nor is what cannot be run with the demand's schedule.
    """
    judged: list[Judgement] = []
    count = min(count, len(steps.batches))
    seen = steps.layouts
    for candidate in sorted(candidates, key=lambda one: (one.layout not in seen, one.estimated_s)):
        try:
            limits_s = np.full(count, np.inf)
            if candidate.layout not in certain:
                alike = [one for one in judged if one.candidate.placement == candidate.placement]
                limits_s = np.maximum(_seconds_of(judged, count, left), _seconds_of(alike, count, OF_PLACEMENT))
            if candidate.estimated_s <= _ESTIMATED * limits_s[-1]:
                found = steps.judged_within(candidate, strategy, _SLACK * limits_s)
                judged += [] if found is None else [found]
        except ValueError:
            continue
        finally:
            advance(1)
    return sorted(judged, key=lambda one: one.key)


def _seconds_of(judged: Sequence[Judgement], count: int, place: int) -> Floats:
    """Return (count,) the mean seconds of the candidate that is at this place of those that fit, by the first batch, the first
    two, and so on; infinite if fewer fit."""
    fitting = [one.steps_s for one in judged if one.fits]
    if len(fitting) < place:
        return np.full(count, np.inf)
    means = np.cumsum(fitting, axis=1) / np.arange(1, count + 1)
    found: Floats = np.sort(means, axis=0)[place - 1]
    return found
