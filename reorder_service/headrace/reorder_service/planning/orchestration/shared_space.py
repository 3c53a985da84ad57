"""The space of layouts in which encoders run on the GPUs of the LLM's pipelines, estimated as a whole in arrays.

The LLM has every number of slices, and of stages those that whole layers make worth while, on all GPUs. An encoder has one stage
on each GPU or few stages, and slices no wider than its own widths allow: its work is then spread evenly over all GPUs, which is
what disaggregated layouts can only round to. The price is memory, as every GPU holds weights of all units, and bubbles of the
LLM's pipelines that encoders fill only if they are nested in them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from headrace.plan import GENERATOR, LLM
from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.orchestration.candidate import SHARING, Candidate, Placement, UnitGrid
from headrace.reorder_service.planning.orchestration.demand import Demand, UnitDemand
from headrace.reorder_service.planning.orchestration.estimate import (
    exchange_s,
    exposed_exchange_s,
    fullest_bytes,
    hop_s,
    microbatch_samples,
    state_bytes,
    usable_bytes,
)
from headrace.reorder_service.planning.orchestration.layout_space import MICROBATCHES, stage_counts
from headrace.reorder_service.planning.orchestration.searches.grid_choices import widths
from headrace.reorder_service.planning.orchestration.stage_cuts import layer_share, time_share
from headrace.schedule import EAGER

_GUEST_STAGES = (1, 2, 4, 8)
_MOST_ACTIONS = 30_000
"""Forwards of a step, of as many replicas of all stages as the encoders have: more take too long to simulate, and most of their
microbatches would be empty."""
_OF_EACH = 3
"""Layouts that are taken of each number of stages and slices of the LLM; their encoders are cut differently."""
_ROOM = 0.9
"""Of the memory, by the estimate's means: real microbatches differ, and the fullest is fuller."""
_TIGHT = 2
"""Layouts that do not fit by the estimate, the leanest, that are taken where there is room for them."""
_LOOKED_AT = 400
"""Layouts, the fastest first, of which the memory is estimated in full."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layouts:
    """(m,) layouts as columns."""

    llm: tuple[Ints, Ints, Ints]
    """dp, tp and pp of the LLM."""
    microbatches: Ints
    guest_tp: Ints
    guest_pp: Ints

    @property
    def ranks(self) -> Ints:
        dp, tp, pp = self.llm
        return dp * tp * pp

    def of(self, rows: Ints) -> _Layouts:
        dp, tp, pp = self.llm
        return _Layouts(
            llm=(dp[rows], tp[rows], pp[rows]),
            microbatches=self.microbatches[rows],
            guest_tp=self.guest_tp[rows],
            guest_pp=self.guest_pp[rows],
        )

    def candidate(self, demand: Demand, row: int, placement: Placement, search: str) -> Candidate:
        dp, tp, pp = (int(column[row]) for column in self.llm)
        guest_tp, guest_pp = int(self.guest_tp[row]), int(self.guest_pp[row])
        guest = UnitGrid(dp=dp * tp * pp // (guest_tp * guest_pp), tp=guest_tp, pp=guest_pp)
        grids = {unit: UnitGrid(dp=dp, tp=tp, pp=pp) if unit == LLM else guest for unit in demand.unit_names}
        return Candidate(search=search, grids=grids, microbatches=int(self.microbatches[row]), placement=placement)


def shares(demand: Demand) -> bool:
    """Return whether encoders of this demand can be on the LLM's pipelines, as far as is searched.

    There is no generator, which would have GPUs of its own beside them; and the schedule is neither interleaved nor eager, whose
    depth follows from memory that encoders share.
    """
    return len(demand.units) > 1 and GENERATOR not in demand.unit_names and demand.schedule != EAGER and demand.chunks == 1


def shared_candidates(demand: Demand, most: int, placements: Collection[str], search: str) -> tuple[list[Candidate], int]:
    """Return at most so many candidates of each placement with shared GPUs that is asked for, and the number of all layouts."""
    asked: list[Placement] = [placement for placement in SHARING if placement in placements]
    if not asked or not shares(demand):
        return [], 0
    layouts = _layouts(demand)
    found = []
    for placement in asked:
        seconds = _step_s(demand, layouts, nested=placement == "nested")
        found += _fastest(demand, layouts, seconds, placement, search, most)
    return found, len(asked) * layouts.microbatches.size


def _layouts(demand: Demand) -> _Layouts:
    """Return all layouts whose state alone does not exceed the memory of a GPU; all, if there are none such."""
    cluster, batch = demand.cluster, demand.global_batch
    llm, guests = _units(demand)
    guest_widths = sorted(set.intersection(*(set(widths(unit, cluster.gpus_per_node)) for unit in guests)))
    rows = [
        (min(cluster.num_gpus // (tp * pp), batch // count), tp, pp, count, guest_tp, guest_pp)
        for tp, pp in itertools.product(widths(llm, cluster.gpus_per_node), stage_counts(llm.layers))
        for count in _counts(demand, cluster.num_gpus // (tp * pp))
        for guest_tp, guest_pp in itertools.product(guest_widths, _GUEST_STAGES)
        if guest_pp <= min(unit.layers for unit in guests)
    ]
    dp, tp, pp, count, guest_tp, guest_pp = np.array(rows, np.int64).reshape(-1, 6).T
    state, replicas = state_bytes(llm, dp, tp, pp), np.maximum(1, dp * tp * pp // (guest_tp * guest_pp))
    whole = (dp * tp * pp % (guest_tp * guest_pp) == 0) & (replicas * count * (pp + guest_pp * len(guests)) <= _MOST_ACTIONS)
    for unit in guests:
        state = state + state_bytes(unit, replicas, guest_tp, guest_pp)
    fitting = whole & (state <= usable_bytes(cluster))
    every = _Layouts(llm=(dp, tp, pp), microbatches=count, guest_tp=guest_tp, guest_pp=guest_pp)
    return every.of(np.flatnonzero(fitting if fitting.any() else whole))


def _counts(demand: Demand, replicas: int) -> list[int]:
    """Return the numbers of microbatches that leave a replica a sample in each; none where there is no GPU for a replica."""
    if replicas == 0:
        return []
    one_each = demand.global_batch // replicas
    return sorted({count for count in (*MICROBATCHES, one_each) if 1 <= count <= max(1, one_each)})


def _units(demand: Demand) -> tuple[UnitDemand, list[UnitDemand]]:
    return next(unit for unit in demand.units if unit.name == LLM), [unit for unit in demand.units if unit.name != LLM]


def _step_s(demand: Demand, layouts: _Layouts, *, nested: bool) -> Floats:
    """Return the estimated seconds of a step of each layout.

    The LLM's pipelines take what `estimate.step_s` says. Encoders in front take their share of the encoders' work besides. Nested
    ones take it only as far as the LLM's bubbles are too short for it, but for the first microbatch's forward, which is in front
    of all, and the last one's backward.
    """
    llm, guests = _units(demand)
    cluster, batch, count = demand.cluster, demand.global_batch, layouts.microbatches
    dp, _, pp = layouts.llm
    samples = batch / count / dp
    whole, stage = _of_microbatch(llm, layouts.llm, samples)
    chain = np.maximum(whole, _largest(llm, layouts.llm[1])) + (pp - 1) * hop_s(llm, cluster, samples) + (count - 1) * stage
    replicas = layouts.ranks // (layouts.guest_tp * layouts.guest_pp)
    shape = replicas, layouts.guest_tp, layouts.guest_pp
    work, first, sent = np.zeros(count.size), np.zeros(count.size), np.zeros(count.size)
    exposed = np.zeros(count.size)
    for unit in guests:
        of_microbatch, of_stage = _of_microbatch(unit, shape, batch / count / replicas)
        largest = _largest(unit, layouts.guest_tp)
        work += np.maximum(count * of_stage, largest * time_share(unit, layouts.guest_pp))
        first = np.maximum(first, np.maximum(of_microbatch, largest) + 2 * hop_s(unit, cluster, samples))
        sent += exchange_s(unit, cluster, *shape)
        exposed += exposed_exchange_s(unit, cluster, *shape, of_stage / (1 + unit.backward_factor))[1]
    exposed += sum(exposed_exchange_s(llm, cluster, *layouts.llm, stage / (1 + llm.backward_factor)))
    if nested:
        return np.maximum(chain + first, count * stage + work) + exposed
    return chain + np.maximum(work, sent) + exposed


def _of_largest(demand: Demand, candidate: Candidate) -> float:
    """Return how much more a GPU holds of all units if one of its microbatches has the largest sample, instead of the mean."""
    more = 0.0
    for unit in demand.units:
        grid = candidate.grids[unit.name]
        if unit.backward_factor > 0:
            kept = unit.kept_bytes[grid.tp] * float(layer_share(unit, grid.pp))
            more += max(0.0, float(kept.max()) - float(kept.mean()) * microbatch_samples(demand, candidate, unit.name))
    return more


def _of_microbatch(unit: UnitDemand, shape: tuple[Ints, Ints, Ints], samples: Floats) -> tuple[Floats, Floats]:
    """Return the seconds of a mean microbatch, forward and backward, in all stages of a unit, and in the longest one."""
    _, tp, pp = shape
    seconds = np.zeros(tp.size)
    for width, forward_s in unit.forward_s.items():
        seconds[tp == width] = float(forward_s.mean()) * (1 + unit.backward_factor)
    whole = samples * seconds + sum(unit.microbatch_s)
    return whole, whole * time_share(unit, pp)


def _largest(unit: UnitDemand, tp: Ints) -> Floats:
    """Return the seconds of a microbatch of the largest sample in all of a unit."""
    seconds = np.zeros(tp.size)
    for width, forward_s in unit.forward_s.items():
        seconds[tp == width] = float(forward_s.max()) * (1 + unit.backward_factor) + sum(unit.microbatch_s)
    return seconds


def _fastest(demand: Demand, layouts: _Layouts, seconds: Floats, placement: Placement, search: str, most: int) -> list[Candidate]:
    """Return at most so many candidates: half of them surely fit the memory, and the others may, the fastest of each.

    Where there are fewer, the leanest that do not fit by the estimate come last.
    """
    usable = usable_bytes(demand.cluster)
    taken: dict[tuple[bool, int, int], set[UnitGrid]] = {}
    sure: list[Candidate] = []
    likely: list[Candidate] = []
    tight: list[tuple[float, Candidate]] = []
    for row in np.argsort(seconds, kind="stable")[:_LOOKED_AT].tolist():
        candidate = layouts.candidate(demand, row, placement, search)
        memory = fullest_bytes(demand, candidate)
        if memory > _ROOM * usable:
            tight.append((memory, candidate))
            continue
        is_sure = memory + _of_largest(demand, candidate) <= usable
        of_llm = taken.setdefault((is_sure, candidate.grids[LLM].tp, candidate.grids[LLM].pp), set())
        guest = candidate.grids[candidate.guests[0]]
        if guest not in of_llm and len(of_llm) < _OF_EACH:
            of_llm.add(guest)
            (sure if is_sure else likely).append(candidate)
        if len(sure) >= most:
            break
    found = [*sure[: most - min(len(likely), most // 2)], *likely[: most // 2]]
    leanest = sorted(tight, key=lambda pair: pair[0])
    return [*found, *(candidate for _, candidate in leanest[: min(_TIGHT, most - len(found))])]
