"""Cornstarch's allocation of stages to units, aware of what is frozen (dissertation 3.3.1 and 3.4.1; arXiv version, 5.2).

A layer takes its forward, and of the backward what it has to compute (eq. 3.2 and 3.3). For a number of stages each unit is cut
by the dynamic program of eq. 3.5, which gives the slowest stage for every smaller number as well. These curves are all that the
units have to know of each other: `divide` deals a number of stages so that the slowest of all is as fast as possible, and
`loosely_coupled` is Alg. 1 of the arXiv version, which cuts the encoders to the stage time of the LLM. All units share TP and DP,
as in the paper's experiments.

The arXiv version's tables 3 and 9 to 11 contradict each other (frozen-aware and unaware rows of table 9 have other numbers of
stages, the text has equal ones), so only their direction is of use.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.backward_factors import BackwardTimes, backward_factor, in_front
from headrace.plan import LLM
from headrace.reorder_service.planning.batch import Floats
from headrace.reorder_service.planning.orchestration.candidate import Candidate, UnitGrid
from headrace.reorder_service.planning.orchestration.demand import Demand
from headrace.reorder_service.planning.orchestration.searches.grid_choices import best_first, replica_counts, widths
from headrace.reorder_service.planning.orchestration.searches.option_table import useful_depths
from headrace.reorder_service.planning.orchestration.searches.refusal import no_fit, smallest_layouts
from headrace.reorder_service.planning.orchestration.stage_cuts import time_share

NAME = "cornstarch"
_COUNTED = BackwardTimes()


def layer_seconds(
    forward_s: Mapping[str, Floats],
    frozen: Mapping[str, NDArray[np.bool_]],
    *,
    checkpointing: bool = False,
    times: BackwardTimes = _COUNTED,
) -> dict[str, Floats]:
    """Return by unit the (L,) seconds of each layer's forward and backward (eq. 3.2 and 3.3).

    forward_s: (L,) by unit, in pipeline order, projectors being layers of the encoders. frozen: (L,) by unit. times: measured
    times of the backward's parts over the forward. A forward runs again only in a layer that has a backward.
    """
    learns = {unit: not bool(is_frozen.all()) for unit, is_frozen in frozen.items()}
    found = {}
    for unit, seconds in forward_s.items():
        before = any(learns[other] for other in in_front(unit, tuple(forward_s)))
        factors = np.empty(seconds.size)
        for layer, is_frozen in enumerate(frozen[unit].tolist()):
            factors[layer] = backward_factor(frozen=is_frozen, behind_trainable=before, checkpointing=checkpointing, times=times)
            before = before or not is_frozen
        found[unit] = seconds * (1.0 + factors)
    return found


def least_bottlenecks(seconds: Floats) -> Floats:
    """Return (L,) the seconds of the slowest stage of the best cut of L layers into 1 .. L stages (eq. 3.5). O(L^3)."""
    ends = np.concatenate([[0.0], np.cumsum(seconds)])
    last_stage = ends[None, :] - ends[:, None]  # layers j .. i - 1 as one stage
    last_stage[np.tril_indices(ends.size)] = np.inf  # which has a layer at least
    best = ends.copy()
    found = [float(best[-1])]
    for _ in range(1, seconds.size):
        best = np.maximum(best[:, None], last_stage).min(axis=0)
        found.append(float(best[-1]))
    return np.array(found)


def divide(curves: Sequence[Floats], num_stages: int) -> tuple[int, ...]:
    """Deal stages to units so that the slowest of all stages is as fast as possible: the fewest for each unit that reach it.

    curves: (L,) of each unit, of `least_bottlenecks`. The seconds sought are one of the curves' values: the least with which the
    units need no more stages than there are. Raises ValueError for fewer stages than units.
    """
    if num_stages < len(curves):
        raise ValueError(f"{len(curves)} units need at least one stage each, got {num_stages}")
    values = np.unique(np.concatenate(curves))
    low, high = 0, values.size - 1
    while low < high:
        middle = (low + high) // 2
        needed = _fewest(curves, float(values[middle]))
        if needed is not None and sum(needed) <= num_stages:
            high = middle
        else:
            low = middle + 1
    found = _fewest(curves, float(values[low]))
    assert found is not None
    return found


def _fewest(curves: Sequence[Floats], limit: float) -> tuple[int, ...] | None:
    """Return for each unit the fewest stages none of which takes longer than `limit`; None if a unit has none such."""
    stages = [1 + int(np.argmax(curve <= limit)) if curve[-1] <= limit else 0 for curve in curves]
    return tuple(stages) if all(stages) else None


def loosely_coupled(curves: Sequence[Floats], llm: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Yield for each number of LLM stages the fewest stages of the other units that are no slower (arXiv version, Alg. 1).

    curves: as in `divide`; llm: index of the LLM. A unit whose layers cannot be that fast gets the fewest stages of its fastest
    cut. Numbers whose sum is beyond `num_stages` are left out.
    """
    for number in range(1, curves[llm].size + 1):
        target = curves[llm][number - 1]
        stages = [number if u == llm else 1 + int(np.argmax(curve <= max(target, curve[-1]))) for u, curve in enumerate(curves)]
        if sum(stages) <= num_stages:
            yield tuple(stages)


def search(demand: Demand, microbatch: int = 1, *, aware: bool = True) -> list[Candidate]:
    """Return the fastest divisions of stages over all common numbers of replicas and of slices, best first.

    microbatch: samples of a microbatch of a replica. aware: whether stages are levelled by forward and backward as they are, and
    not as if everything learnt. Raises ValueError, in a sentence for the user, if nothing fits.
    """
    node, llm = demand.cluster.gpus_per_node, demand.unit_names.index(LLM)
    common = set.intersection(*(set(widths(unit, node)) for unit in demand.units))
    if not common:
        raise ValueError(f"{NAME}: {', '.join(demand.unit_names)} have no tensor-parallel width in common: allow one for all")
    candidates = []
    for dp, tp in itertools.product(replica_counts(demand, microbatch), sorted(common)):
        num_stages = demand.cluster.num_gpus // (dp * tp)
        if num_stages < len(demand.units):
            continue
        curves = []
        for unit in demand.units:
            whole = demand.step_s(unit, tp) if aware else float(unit.forward_s[tp].mean())
            curves.append(whole * time_share(unit, np.arange(1, unit.layers + 1)))
        divisions = {divide(curves, num_stages), *loosely_coupled(curves, llm, num_stages)}
        for stages in sorted(divisions):
            grids = {name: UnitGrid(dp=dp, tp=tp, pp=pp) for name, pp in zip(demand.unit_names, stages, strict=True)}
            if grids[LLM].pp in useful_depths(demand.units[llm].layers):
                microbatches = demand.global_batch // (dp * microbatch)
                candidates.append(Candidate(search=NAME, grids=grids, microbatches=microbatches))
    if found := best_first(demand, candidates):
        return found
    raise no_fit(demand, NAME, candidates or smallest_layouts(demand, NAME, microbatch))
