"""The space of layouts in which encoders run on the GPUs of the LLM's pipelines, estimated as a whole in arrays.

The LLM has every number of slices, and of stages those that whole layers make worth while, on all GPUs. An encoder has one stage
on each GPU or few stages, and slices no wider than its own widths allow: its work is then spread evenly over all GPUs, which is
what disaggregated layouts can only round to. The price is memory, as every GPU holds weights of all units, and bubbles of the
LLM's pipelines that encoders fill only if they are nested in them. A generator, which the LLM's backwards wait for, has GPUs of
its own, those shares of all GPUs that its work is of all work, rounded to its replicas. Beside nested encoders it may be nested
as well, on all GPUs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

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
from headrace.reorder_service.planning.orchestration.layout_space import MICROBATCHES, stage_choices
from headrace.reorder_service.planning.orchestration.searches.grid_choices import widths
from headrace.reorder_service.planning.orchestration.stage_cuts import layer_share, time_share
from headrace.schedule import EAGER

_GUEST_STAGES = (1, 2, 4, 8)
_GENERATOR_STAGES = 4
_MOST_ACTIONS = 30_000
"""Forwards of a step, of as many replicas of all stages as the encoders have: more take too long to simulate, and most of their
microbatches would be empty."""
_OF_EACH = 3
"""Layouts that are taken of each number of stages and slices of the LLM; what shares its GPUs is cut differently."""
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
    generator: tuple[Ints, Ints, Ints]
    """dp, tp and pp of the generator, if there is one."""
    has_generator: bool
    """Whether that is on the LLM's GPUs."""

    @property
    def ranks(self) -> Ints:
        dp, tp, pp = self.llm
        return dp * tp * pp

    def of(self, rows: Ints) -> _Layouts:
        dp, tp, pp = self.llm
        of_generator, generator_tp, generator_pp = self.generator
        return _Layouts(
            llm=(dp[rows], tp[rows], pp[rows]),
            microbatches=self.microbatches[rows],
            guest_tp=self.guest_tp[rows],
            guest_pp=self.guest_pp[rows],
            generator=(of_generator[rows], generator_tp[rows], generator_pp[rows]),
            has_generator=self.has_generator,
        )

    def candidate(self, demand: Demand, row: int, seconds: float, placement: Placement, search: str) -> Candidate:
        dp, tp, pp = (int(column[row]) for column in self.llm)
        guest_tp, guest_pp = int(self.guest_tp[row]), int(self.guest_pp[row])
        guest = UnitGrid(dp=dp * tp * pp // (guest_tp * guest_pp), tp=guest_tp, pp=guest_pp)
        of_generator, generator_tp, generator_pp = (int(column[row]) for column in self.generator)
        hosts = {
            LLM: UnitGrid(dp=dp, tp=tp, pp=pp),
            GENERATOR: UnitGrid(dp=of_generator, tp=generator_tp, pp=generator_pp),
        }
        return Candidate(
            search=search,
            grids={unit: hosts.get(unit, guest) for unit in demand.unit_names},
            microbatches=int(self.microbatches[row]),
            placement=placement,
            has_generator=self.has_generator,
            estimated_s=seconds,
        )


def shares(demand: Demand) -> bool:
    """Return whether this demand has encoders, which can be on the LLM's pipelines."""
    return demand.unit_names[0] != LLM


def can_be_cut(demand: Demand, candidate: Candidate) -> bool:
    """Return whether passes of what shares the LLM's GPUs can be cut into pieces, and are where it has bubbles for these."""
    of_one_stage = all(candidate.grids[unit].pp == 1 for unit in candidate.guests)
    return candidate.placement == "nested" and demand.chunks == 1 and of_one_stage and candidate.grids[LLM].pp > 1


def in_pieces(demand: Demand, candidate: Candidate, numbers: Sequence[int]) -> Iterator[Candidate]:
    """Yield the candidate with passes of what shares GPUs cut into so many pieces, which have a layer each at least."""
    layers = min(unit.layers for unit in demand.units if unit.name in candidate.guests)
    for number in numbers:
        if number <= layers:
            yield replace(candidate, pieces=number)


def regridded(demand: Demand, candidate: Candidate) -> Iterator[Candidate]:
    """Yield the candidate with twice or half as many slices, or stages, of the encoders on the LLM's GPUs, or of the generator
    there: real samples tell better than the estimate which is best."""
    guests = [unit for unit in demand.units if unit.name in candidate.guests]
    for alike in ([unit for unit in guests if (unit.name == GENERATOR) == of_generator] for of_generator in (False, True)):
        if alike:
            yield from _of_other_grids(demand, candidate, alike)


def _of_other_grids(demand: Demand, candidate: Candidate, units: Sequence[UnitDemand]) -> Iterator[Candidate]:
    """Yield the candidate with twice or half as many slices, or stages, of some units that have the same grid."""
    ranks, own = candidate.grids[LLM].gpus, candidate.grids[units[0].name]
    for tp, pp in ((own.tp // 2, own.pp), (own.tp * 2, own.pp), (own.tp, own.pp // 2), (own.tp, own.pp * 2)):
        grid = UnitGrid(dp=ranks // (tp * pp) if tp * pp else 0, tp=tp, pp=pp)
        if grid.gpus == ranks and all(
            tp in widths(unit, demand.cluster.gpus_per_node) and unit.allows(grid.dp, pp) and pp * demand.chunks <= unit.layers
            for unit in units
        ):
            yield replace(candidate, grids={**candidate.grids, **dict.fromkeys((unit.name for unit in units), grid)})


def shared_candidates(demand: Demand, most: int, placements: Collection[str], search: str) -> tuple[list[Candidate], int]:
    """Return at most so many candidates of each placement with shared GPUs that is asked for, and the number of all layouts.

    Nested ones with the generator on the LLM's GPUs and with one on its own are as two placements.
    """
    asked: list[Placement] = [placement for placement in SHARING if placement in placements]
    if not asked or not shares(demand):
        return [], 0
    found: list[Candidate] = []
    num_layouts = 0
    for has_generator in (False, True) if GENERATOR in demand.unit_names else (False,):
        layouts = _layouts(demand, has_generator=has_generator)
        for placement in asked:
            nested = placement == "nested"
            if nested or not has_generator:
                seconds, of_means_s = (_step_s(demand, layouts, nested=nested, of_means=of_means) for of_means in (False, True))
                found += _fastest(demand, layouts, (seconds, of_means_s), placement, search, most)
                num_layouts += layouts.microbatches.size
    return found, num_layouts


def _layouts(demand: Demand, *, has_generator: bool) -> _Layouts:
    """Return all layouts whose state alone does not exceed the memory of a GPU; all, if there are none such.

    has_generator: whether the generator is on the LLM's GPUs.
    """
    cluster, batch, chunks = demand.cluster, demand.global_batch, demand.chunks
    llm, guests, generator = _units(demand)
    guest_widths = sorted(set.intersection(*(set(widths(unit, cluster.gpus_per_node)) for unit in guests)))
    of_guests = list(itertools.product(guest_widths, _stages_on_llm(guests, chunks)))
    rows = [
        (replicas, tp, pp, count, *of_generator)
        for of_generator in (_nested_generators(demand) if has_generator else _generators(demand))
        if (left := cluster.num_gpus - of_generator[0] * of_generator[1] * of_generator[2]) > 0
        for tp, pp in itertools.product(widths(llm, cluster.gpus_per_node), stage_choices(llm, chunks))
        for count in _counts(demand, llm.most_replicas(left // (tp * pp)))
        if of_generator[0] * count <= batch
        if (replicas := llm.most_replicas(min(left // (tp * pp), batch // count)))
    ]
    columns = np.repeat(np.array(rows, np.int64).reshape(-1, 7), len(of_guests), axis=0).T
    dp, tp, pp, count, of_generator, generator_tp, generator_pp = columns
    guest_tp, guest_pp = np.tile(np.array(of_guests, np.int64).reshape(-1, 2), (len(rows), 1)).T
    if has_generator:
        of_generator = dp * tp * pp // (generator_tp * generator_pp)
    state, replicas = state_bytes(llm, dp, tp, pp), np.maximum(1, dp * tp * pp // (guest_tp * guest_pp))
    forwards = np.maximum(replicas, of_generator) * count * (pp + guest_pp * len(guests) + generator_pp) * chunks
    whole = (dp * tp * pp % (guest_tp * guest_pp) == 0) & (forwards <= _MOST_ACTIONS)
    on_its_ranks = generator_tp * generator_pp if has_generator else generator_tp
    whole &= dp * tp * pp % np.maximum(1, on_its_ranks) == 0  # slices of a layer lie in one node
    for unit in guests:
        state = state + state_bytes(unit, replicas, guest_tp, guest_pp)
        whole &= unit.only_dp is None or np.isin(replicas, unit.only_dp)
    if generator is not None:
        whole &= generator.only_dp is None or np.isin(of_generator, generator.only_dp)
        of_its_ranks = state_bytes(generator, np.maximum(1, of_generator), generator_tp, generator_pp)
        state = state + of_its_ranks if has_generator else np.maximum(state, of_its_ranks)
    fitting = whole & (state <= usable_bytes(cluster))
    every = _Layouts(
        llm=(dp, tp, pp),
        microbatches=count,
        guest_tp=guest_tp,
        guest_pp=guest_pp,
        generator=(of_generator, generator_tp, generator_pp),
        has_generator=has_generator,
    )
    return every.of(np.flatnonzero(fitting if fitting.any() else whole))


def _generators(demand: Demand) -> list[tuple[int, int, int]]:
    """Return (dp, tp, pp) of the generator for every width and few numbers of stages, with the GPUs that its share of the work
    asks for, rounded down and up; zeros if there is none."""
    generator = _units(demand)[2]
    if generator is None:
        return [(0, 0, 0)]
    found = []
    work = {unit.name: demand.step_s(unit, min(unit.forward_s)) for unit in demand.units}
    rest_s = sum(work.values()) - work[GENERATOR]
    for tp in widths(generator, demand.cluster.gpus_per_node):
        for pp in stage_choices(generator, demand.chunks, _GENERATOR_STAGES):
            own_s = demand.step_s(generator, tp) * float(time_share(generator, pp)) * tp * pp
            even = demand.cluster.num_gpus * own_s / (own_s + rest_s) / (tp * pp)
            found += [(dp, tp, pp) for dp in generator.only_dp or (max(1, math.floor(even)), max(1, math.ceil(even)))]
    return list(dict.fromkeys(found))


def _nested_generators(demand: Demand) -> list[tuple[int, int, int]]:
    """Return (0, tp, pp) of the generator for every width and few numbers of stages: it has no GPUs besides the LLM's."""
    [generator] = [unit for unit in demand.units if unit.name == GENERATOR]
    stages = _stages_on_llm([generator], demand.chunks)
    return [(0, tp, pp) for tp, pp in itertools.product(widths(generator, demand.cluster.gpus_per_node), stages)]


def _stages_on_llm(units: Sequence[UnitDemand], chunks: int) -> list[int]:
    """Return the numbers of stages that units, all alike, have on the LLM's GPUs: those that are allowed, or a few."""
    allowed = [set(unit.only_pp) for unit in units if unit.only_pp is not None]
    stages = sorted(set.intersection(*allowed)) if allowed else _GUEST_STAGES
    return [pp for pp in stages if pp * chunks <= min(unit.layers for unit in units)]


def _counts(demand: Demand, replicas: int) -> list[int]:
    """Return the numbers of microbatches that leave a replica a sample in each; none where there is no GPU for a replica."""
    if replicas == 0:
        return []
    one_each = demand.global_batch // replicas
    return sorted({count for count in (*MICROBATCHES, one_each) if 1 <= count <= max(1, one_each)})


def _units(demand: Demand) -> tuple[UnitDemand, list[UnitDemand], UnitDemand | None]:
    """Return the LLM, the units that share its GPUs, and the generator, if there is one."""
    units = {unit.name: unit for unit in demand.units}
    guests = [unit for name, unit in units.items() if name not in (LLM, GENERATOR)]
    return units[LLM], guests, units.get(GENERATOR)


def _step_s(demand: Demand, layouts: _Layouts, *, nested: bool, of_means: bool) -> Floats:
    """Return the estimated seconds of a step of each layout.

    The LLM's pipelines, with a generator behind them, take what `estimate.step_s` says. Encoders in front take their share of the
    encoders' work besides. Nested ones, and a nested generator, take it only as far as the LLM's bubbles are too short, but for
    the first microbatch's forward, which is in front of all, and the last one's backward. of_means: as if all samples were mean
    ones.
    """
    llm, guests, generator = _units(demand)

    def largest_s(unit: UnitDemand, tp: Ints) -> Floats:
        return np.zeros(tp.size) if of_means else _largest(unit, tp)

    cluster, batch, count = demand.cluster, demand.global_batch, layouts.microbatches
    dp, _, pp = layouts.llm
    samples = batch / count / dp
    whole, stage = _of_microbatch(llm, layouts.llm, samples)
    filling, slowest = np.maximum(whole, largest_s(llm, layouts.llm[1])) + (pp - 1) * hop_s(llm, cluster, samples), stage
    behind = np.zeros(count.size)
    if generator is not None:
        of_generator, generator_tp, generator_pp = layouts.generator
        each = batch / count / of_generator
        in_all, of_stage = _of_microbatch(generator, layouts.generator, each)
        in_all = np.maximum(in_all, largest_s(generator, generator_tp)) + (generator_pp - 1) * hop_s(generator, cluster, each)
        filling, slowest = filling + in_all + hop_s(llm, cluster, samples), np.maximum(stage, of_stage)
        at_first, at_last = exposed_exchange_s(generator, cluster, *layouts.generator, of_stage / (1 + generator.backward_factor))
        behind = at_first + at_last
    chain = filling / demand.chunks + (count - 1) * slowest
    replicas = layouts.ranks // (layouts.guest_tp * layouts.guest_pp)
    shape = replicas, layouts.guest_tp, layouts.guest_pp
    work, first, sent = np.zeros(count.size), np.zeros(count.size), np.zeros(count.size)
    exposed = np.zeros(count.size)
    if layouts.has_generator:
        work, exposed, behind = count * of_stage, behind, exposed
    for unit in guests:
        of_microbatch, of_stage = _of_microbatch(unit, shape, batch / count / replicas)
        largest = largest_s(unit, layouts.guest_tp)
        work += np.maximum(count * of_stage, largest * time_share(unit, layouts.guest_pp))
        first = np.maximum(first, np.maximum(of_microbatch, largest) + 2 * hop_s(unit, cluster, samples))
        sent += exchange_s(unit, cluster, *shape)
        exposed += exposed_exchange_s(unit, cluster, *shape, of_stage / (1 + unit.backward_factor))[1]
    exposed += sum(exposed_exchange_s(llm, cluster, *layouts.llm, stage / (1 + llm.backward_factor)))
    exposed = np.maximum(exposed, behind)
    if nested:
        return np.maximum(chain + first / demand.chunks, count * stage + work) + exposed
    return chain + np.maximum(work, sent) + exposed


def _deepest(demand: Demand, candidate: Candidate, room: float) -> Candidate:
    """Return the candidate with as many microbatches in flight as fit the room by the estimate, all of them or a half, a quarter
    and so on."""
    depth = candidate.microbatches
    while depth > 1 and fullest_bytes(demand, replace(candidate, in_flight=depth)) > room:
        depth //= 2
    return replace(candidate, in_flight=depth)


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


def _fastest(
    demand: Demand, layouts: _Layouts, estimates: tuple[Floats, Floats], placement: Placement, search: str, most: int
) -> list[Candidate]:
    """Return at most so many candidates: half of them surely fit the memory, and the others may, the fastest of each.

    Where there are fewer, the leanest that do not fit by the estimate come last. estimates: (m,) seconds of a step, with the
    largest sample and with mean ones.
    """
    usable = usable_bytes(demand.cluster)
    taken: dict[tuple[bool, int, int], set[tuple[UnitGrid, ...]]] = {}
    sure: list[Candidate] = []
    likely: list[Candidate] = []
    tight: list[tuple[float, Candidate]] = []
    seconds, of_means_s = estimates
    for row in np.argsort(seconds, kind="stable")[:_LOOKED_AT].tolist():
        candidate = layouts.candidate(demand, row, float(of_means_s[row]), placement, search)
        candidate = _deepest(demand, candidate, _ROOM * usable) if demand.schedule == EAGER else candidate
        memory = fullest_bytes(demand, candidate)
        if memory > _ROOM * usable:
            tight.append((memory, candidate))
            continue
        is_sure = memory + _of_largest(demand, candidate) <= usable
        of_llm = taken.setdefault((is_sure, candidate.grids[LLM].tp, candidate.grids[LLM].pp), set())
        guests = tuple(candidate.grids[unit] for unit in candidate.guests)
        if guests not in of_llm and len(of_llm) < _OF_EACH:
            of_llm.add(guests)
            (sure if is_sure else likely).append(candidate)
        if len(sure) >= most:
            break
    found = [*sure[: most - min(len(likely), most // 2)], *likely[: most // 2]]
    leanest = sorted(tight, key=lambda pair: pair[0])
    return [*found, *(candidate for _, candidate in leanest[: min(_TIGHT, most - len(found))])]
