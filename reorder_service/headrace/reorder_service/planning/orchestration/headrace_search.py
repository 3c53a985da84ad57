"""Headrace's search: the fastest layouts by the estimate, and what every other search has found, before the judge.

The judge simulates planned steps of real global batches, which takes thousands of times as long as the estimate. So few batches
sort out most candidates (successive halving), planned by a quick strategy, and those that are left are judged on all batches. The
answers of the other searches always are among these, so that on the judge's batches no search has a better answer than this one.
So are the best layouts of every placement, so that it can be said which placement wins, and why the others lose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from headrace.plan import LLM
from headrace.reorder_service.planning.batch import Ints
from headrace.reorder_service.planning.orchestration.bubble_bound import bubble_bound_s
from headrace.reorder_service.planning.orchestration.candidate import Candidate, Placement, UnitGrid
from headrace.reorder_service.planning.orchestration.demand import Demand
from headrace.reorder_service.planning.orchestration.judge import QUICK_STRATEGIES, draw_batches
from headrace.reorder_service.planning.orchestration.judgement import Judgement, merged, seconds_beside
from headrace.reorder_service.planning.orchestration.layout_shortlist import shortlisted
from headrace.reorder_service.planning.orchestration.layout_space import MICROBATCHES
from headrace.reorder_service.planning.orchestration.shared_space import can_be_cut, in_pieces, regridded, shared_candidates
from headrace.reorder_service.planning.orchestration.simulated_steps import OF_PLACEMENT, Mapped, SimulatedSteps, sorted_out
from headrace.reorder_service.planning.strategies import AUTO, CANDIDATES

NAME = "headrace"
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
"""What `search` may take."""
SHORTLIST, NUM_BATCHES, ALTERNATIVES = 50, 20, 10
_QUICK = QUICK_STRATEGIES[0]
"""Strategy that sorts out."""
_LARGE = 512
"""Samples of a global batch above which not all strategies are tried, as those that search take a good part of a second, and half
as many batches sort out: large ones differ less."""
_ROUNDS = ((2, 15), (4, ALTERNATIVES + 2))
"""Batches that a round judges by, and candidates that it leaves."""
_COMPARED, _FINALISTS = 6, 2
"""Batches by which the alternatives are judged with the job's strategy, and how many of them are judged on all."""
_FIRST, _NEAR, _FAR = 2, 1.1, 1.5
"""Batches after which only those alternatives are judged further that take no longer than so many times the best, and of large
global batches what other searches answer no further than up to the latter, and on all batches only up to the former."""
_VARIED = 5
"""Of the best candidates of the first round, how many are tried with other numbers of microbatches too, and so is the best of
each placement."""
_SHARED = 8
"""Candidates of each placement with shared GPUs that are judged at all."""
_PIECES, _CUT = (2, 4, 8), 2
"""Pieces of encoders' passes that are tried, and of how many nested candidates: the best after the first round that differ in the
LLM's grid. Of as many with shared GPUs other slices and stages of the encoders, or of the generator, are tried."""

Advance = Callable[[int], object]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """What the search found on the judge's batches."""

    best: Judgement
    answers: Mapping[str, Judgement]
    """Of the other searches, by name. What exceeds the memory, and in large batches what takes far longer than the best, is
    judged by few batches, which suffice to see that."""
    alternatives: Sequence[Judgement]
    """The next best, at most ALTERNATIVES of them."""
    of_placements: Mapping[str, Judgement]
    """The best layout of each placement, the best first."""
    bubble_bound_s: float | None
    """What no placement of encoders' kernels in the LLM's bubbles beats on the GPUs of the best nested layout, if there is
    one."""
    batches: Ints
    """(b, B) rows of the global batches that all of them were judged by."""
    num_estimated: int
    num_simulated: int


def search(
    demand: Demand,
    others: Mapping[str, Candidate],
    *,
    strategy: str = AUTO,
    seed: int = 0,
    num_batches: int = NUM_BATCHES,
    shortlist: int = SHORTLIST,
    placements: Collection[str] = PLACEMENTS,
    advance: Advance = int,
    mapped: Mapped = map,
) -> Found:
    """Search for the fastest placement of a demand.

    others: the answers of other searches, by name. strategy: that of the job. placements: those that may be taken; what others
    answer besides is compared only. advance: called with the number of candidates that were judged since, of `num_judgements`.
    mapped: as for `SimulatedSteps`. Raises ValueError if nothing can be placed at all.
    """
    batches = draw_batches(demand, num_batches, seed)
    own, num_estimated = candidates_of(demand, shortlist, placements)
    pool = _together(own, others.values())
    if not any(candidate.placement in placements for candidate in pool):
        raise ValueError(
            f"{demand.cluster.num_gpus} GPUs are too few for {', '.join(demand.unit_names)}{_as_allowed(demand)}: take more "
            "GPUs, or a smaller model"
        )
    steps, answers_of_others = SimulatedSteps(demand, batches, seed, mapped), {candidate.layout for candidate in others.values()}
    fewer = 1 if demand.global_batch <= _LARGE else 2
    for count, left in _ROUNDS:
        judged = sorted_out(steps, pool, _QUICK, count=count // fewer, left=left, certain=answers_of_others, advance=advance)
        near = [] if (count, left) == _ROUNDS[-1] else _varied(demand, [one.candidate for one in judged])
        pool = _together(_kept(judged, left), [*others.values(), *near])
        steps.forget_all_but(pool)
    strategies = {candidate.layout: _strategy(steps, candidate, strategy) for candidate in pool}
    few = range(num_batches)[: _COMPARED // fewer]
    compared = _compared(steps, pool, (few[: _FIRST // fewer], few), strategies, answers_of_others, advance)
    if not compared:
        raise ValueError(
            f"no plan of strategy {strategy!r} can be run with schedule {demand.schedule!r}: take another of the two"
        )
    asked = [one for one in compared if one.candidate.placement in placements]
    on_all = {one.candidate.layout for one in asked[:_FINALISTS]} | {
        one.candidate.layout
        for one in compared
        if one.candidate.layout in answers_of_others and (fewer == 1 or one.step_s <= _NEAR * compared[0].step_s)
    }
    final = [
        finished
        for one in compared
        if one.candidate.layout in on_all and one.fits
        for finished in _finished(steps, one, strategies, advance)
    ]
    if asked and not asked[0].fits:
        final = asked[:1]
    final.sort(key=lambda one: (one.candidate.placement not in placements, one.key))
    if not final or final[0].candidate.placement not in placements:
        raise ValueError(f"no plan of all {num_batches} batches can be run with schedule {demand.schedule!r}: take another")
    judged_on_all = {one.candidate.layout for one in final}
    best = replace(final[0], candidate=replace(final[0].candidate, search=NAME))
    of_layout = {one.candidate.layout: one for one in (*compared, *final)}
    answers = {
        name: replace(of_layout[candidate.layout], candidate=candidate)
        for name, candidate in others.items()
        if candidate.layout in of_layout
    }
    rest = [*final[1:], *(one for one in compared if one.candidate.layout not in judged_on_all)]
    rest.sort(key=lambda one: (one.over_bytes, seconds_beside(one, best)))
    of_placements: dict[str, Judgement] = {}
    for one in (best, *rest):
        if one.candidate.placement in placements and (one is best or one.steps_s.size >= len(few)):
            of_placements.setdefault(one.candidate.placement, one)
    return Found(
        best=best,
        answers=answers,
        alternatives=rest[:ALTERNATIVES],
        of_placements=of_placements,
        bubble_bound_s=bubble_bound_s(demand, of_placements["nested"], batches, seed) if "nested" in of_placements else None,
        batches=batches,
        num_estimated=num_estimated,
        num_simulated=steps.num_simulated,
    )


def _as_allowed(demand: Demand) -> str:
    """Return what is said of a demand whose units may not have all grids."""
    restricted = any(unit.only_dp is not None or unit.only_pp is not None for unit in demand.units)
    return " with the dp, tp and pp that are allowed" if restricted else ""


def num_judgements(num_others: int, shortlist: int = SHORTLIST) -> int:
    """Return about how many candidates `search` judges in all its rounds, for a progress bar."""
    rounds = sum(left for _, left in _ROUNDS) + (2 + len(_ROUNDS)) * num_others + _FINALISTS + 4 * _VARIED
    rounds += _CUT * (len(_PIECES) + 8) + 4 * len(PLACEMENTS)
    return shortlist + len(MICROBATCHES) + 3 * _SHARED + (1 + len(_ROUNDS)) * OF_PLACEMENT * len(PLACEMENTS) + rounds


def candidates_of(demand: Demand, most: int, placements: Collection[str]) -> tuple[list[Candidate], int]:
    """Return at most so many disaggregated candidates (`layout_shortlist`) and those of other placements, and the number of
    layouts that they were chosen from."""
    found: list[Candidate] = []
    num_estimated = 0
    if "disaggregated" in placements:
        found, num_estimated = shortlisted(demand, most, NAME)
    if "colocated" in placements:
        colocated = list(_colocated(demand))
        num_estimated += len(colocated)
        found += colocated
    shared, num_layouts = shared_candidates(demand, min(most, _SHARED), placements, NAME)
    return found + shared, num_estimated + num_layouts


def _colocated(demand: Demand) -> Iterable[Candidate]:
    """Yield candidates with all units on every GPU, as FSDP trainers run them, by their number of microbatches."""
    most = min(demand.cluster.num_gpus, demand.global_batch)
    ranks = next((dp for dp in range(most, 0, -1) if all(unit.allows(dp, 1) for unit in demand.units)), 0)
    if ranks == 0 or any(1 not in unit.forward_s for unit in demand.units):
        return
    grids = {unit: UnitGrid(dp=ranks, tp=1, pp=1) for unit in demand.unit_names}
    for count in MICROBATCHES:
        if count == 1 or count * grids[LLM].dp <= demand.global_batch:
            yield Candidate(search=NAME, grids=grids, microbatches=count, placement="colocated")


def _varied(demand: Demand, best: Sequence[Candidate]) -> list[Candidate]:
    """Return what is near the best candidates, which come first, of all and of each placement, and what the estimate cannot tell
    well apart from them."""
    of_placements = {candidate.placement: candidate for candidate in reversed(best)}
    near = [one for candidate in _together(best[:_VARIED], of_placements.values()) for one in _neighbours(demand, candidate)]
    near += [
        replace(one, search=NAME)
        for candidate in _unlike(one for one in best if one.guests)
        for one in regridded(demand, candidate)
    ]
    whole = (candidate for candidate in best if can_be_cut(demand, candidate))
    return near + [one for candidate in _unlike(whole) for one in in_pieces(demand, candidate, _PIECES)]


def _unlike(best: Iterable[Candidate]) -> list[Candidate]:
    """Return the first _CUT candidates, each with another grid of the LLM, or another placement, than those in front of it."""
    found: dict[tuple[str, bool, UnitGrid], Candidate] = {}
    for one in best:
        found.setdefault((one.placement, one.has_generator, one.grids[LLM]), one)
    return list(found.values())[:_CUT]


def _neighbours(demand: Demand, candidate: Candidate) -> Iterable[Candidate]:
    """Yield the same layout with somewhat fewer and somewhat more microbatches."""
    counts = sorted({*MICROBATCHES, candidate.microbatches})
    place = counts.index(candidate.microbatches)
    for count in (*counts[max(0, place - 3) : place], *counts[place + 1 : place + 2]):
        if candidate.placement != "colocated" and count * candidate.grids[LLM].dp <= demand.global_batch:
            yield replace(candidate, search=NAME, microbatches=count)


def _judged(
    steps: SimulatedSteps,
    candidates: Iterable[Candidate],
    indices: Sequence[int],
    strategies: Mapping[str, str],
    advance: Advance,
    *,
    is_apart: bool = True,
) -> list[Judgement]:
    """Judge candidates, each with its strategy; those are left out whose plans cannot be run with the schedule.

    is_apart: as for `SimulatedSteps.judged`.
    """
    found = []
    for candidate in candidates:
        try:
            found.append(steps.judged(candidate, indices, strategies[candidate.layout], is_apart=is_apart))
        except ValueError:
            continue
        finally:
            advance(1)
    return found


def _compared(
    steps: SimulatedSteps,
    candidates: Iterable[Candidate],
    batches: tuple[Sequence[int], Sequence[int]],
    strategies: Mapping[str, str],
    certain: Collection[str],
    advance: Advance,
) -> list[Judgement]:
    """Judge candidates by the first batches, and by all of them what is near the best, the best few of each placement, and what
    is certain and not far behind: the best first.

    batches: indices of the first ones, and of all.
    """
    first, every = batches
    found: list[Judgement] = []
    taken: Counter[str] = Counter()
    far = _FAR if steps.demand.global_batch > _LARGE else np.inf
    for one in sorted(_judged(steps, candidates, first, strategies, advance, is_apart=False), key=lambda one: one.key):
        best_s = (found[0] if found else one).step_s
        goes_on = (one.fits and one.step_s <= _NEAR * best_s) or taken[one.candidate.placement] < OF_PLACEMENT
        goes_on = goes_on or (one.candidate.layout in certain and one.step_s <= far * best_s)
        judged = _judged(steps, [one.candidate], every if goes_on else first, strategies, int)
        found += judged
        taken[one.candidate.placement] += len(judged)
    return sorted(found, key=lambda one: one.key)


def _finished(steps: SimulatedSteps, judged: Judgement, strategies: Mapping[str, str], advance: Advance) -> list[Judgement]:
    """Return what is said of a candidate by all batches, the first of which it was judged on; none if one cannot be run."""
    rest = range(judged.steps_s.size, len(steps.batches))
    if not rest:
        return [judged]
    return [merged(judged, one) for one in _judged(steps, [judged.candidate], rest, strategies, advance, is_apart=False)]


def _strategy(steps: SimulatedSteps, candidate: Candidate, strategy: str) -> str:
    """Return the strategy with which a candidate is judged: for `auto` the one that is the best for the first batch.

    Large global batches are tried with the quick strategies only.
    """
    if strategy != AUTO or candidate.placement == "colocated":
        return strategy
    is_large = steps.demand.global_batch > _LARGE
    tried: Iterable[str] = QUICK_STRATEGIES if is_large else CANDIDATES if candidate.sharing is not None else (AUTO,)
    judged = []
    for name in tried:
        try:
            judged.append(steps.judged(candidate, [0], name, quick=True))
        except ValueError:
            continue
    return min(judged, key=lambda one: one.key).strategy if judged else _QUICK


def _kept(judged: Sequence[Judgement], most: int) -> list[Candidate]:
    """Return the first of the judged candidates, and of every placement the best few.

    Of colocated ones these are all, as they differ in nothing but their microbatches.
    """
    kept: list[Candidate] = []
    for one in judged:
        placement = one.candidate.placement
        of_placement = sum(other.placement == placement for other in kept)
        if of_placement < OF_PLACEMENT or (len(kept) < most and placement != "colocated"):
            kept.append(one.candidate)
    return kept


def _together(ours: Iterable[Candidate], others: Iterable[Candidate]) -> list[Candidate]:
    """Return all candidates, and of several that are laid out alike the first one."""
    of_layout: dict[str, Candidate] = {}
    for candidate in (*ours, *others):
        of_layout.setdefault(candidate.layout, candidate)
    return list(of_layout.values())
