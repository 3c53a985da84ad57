"""The space of disaggregated layouts that Headrace's search looks through, estimated as a whole (eq. 4.2) in arrays.

An LLM has every number of replicas and slices, and of stages those that a stage's whole layers make worth while. The other units
share the GPUs that are left, each with every width and few numbers of stages, so that their stages take equally long; more GPUs
never slow them down, so none are left idle that a replica has room on. So each layout of the LLM stands for the best of what may
be beside it, and the space grows with the GPUs, not with a power of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.plan import GENERATOR, LLM
from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.orchestration.candidate import Candidate, UnitGrid
from headrace.reorder_service.planning.orchestration.demand import Demand, UnitDemand
from headrace.reorder_service.planning.orchestration.estimate import (
    exchange_s,
    exposed_of,
    hop_s,
    state_bytes,
    unit_update_s,
    usable_bytes,
)
from headrace.reorder_service.planning.orchestration.searches.grid_choices import widths
from headrace.reorder_service.planning.orchestration.stage_cuts import time_share

MICROBATCHES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256)
"""Numbers of microbatches that are tried, besides that of one sample each."""
_MOST_STAGES_BESIDE = 8  # of a unit beside the LLM
_MOST_COMBINATIONS = 64  # of widths and stages of the units beside the LLM
_MOST_LISTED = 256  # of widths, stages and replicas of these


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layouts:
    """Many layouts with one number of microbatches, as columns."""

    microbatches: int
    dp: Mapping[str, Ints]
    """By unit, in pipeline order, (m,); tp and pp likewise."""
    tp: Mapping[str, Ints]
    pp: Mapping[str, Ints]
    step_s: Floats
    """(m,) estimated seconds of a step."""
    of_means_s: Floats
    """(m,) the same if all samples were mean ones, which steps seldom beat."""

    def candidate(self, row: int, search: str) -> Candidate:
        """Return one layout."""
        grids = {
            unit: UnitGrid(dp=int(self.dp[unit][row]), tp=int(self.tp[unit][row]), pp=int(self.pp[unit][row])) for unit in self.dp
        }
        return Candidate(search=search, grids=grids, microbatches=self.microbatches, estimated_s=float(self.of_means_s[row]))


def stage_counts(layers: int, chunks: int = 1, most: int | None = None) -> list[int]:
    """Return the numbers of stages with which the longest one has fewer layers than with fewer stages, ascending."""
    parts = range(1, min(most or layers, layers // chunks) + 1)
    found: dict[int, int] = {}
    for stages in parts:
        found.setdefault(-(-layers // (stages * chunks)), stages)
    return list(found.values())


def stage_choices(unit: UnitDemand, chunks: int = 1, most: int | None = None) -> list[int]:
    """Return the numbers of stages that a unit may have: those that are allowed, or `stage_counts`. most: of the latter."""
    if unit.only_pp is None:
        return stage_counts(unit.layers, chunks, most)
    return [stages for stages in unit.only_pp if stages * chunks <= unit.layers]


def layouts(demand: Demand, *, fitting: bool = True) -> Iterator[Layouts]:
    """Yield all layouts of the space, for one number of microbatches after the other.

    fitting: leave out those whose state alone exceeds the memory of a GPU. Raises ValueError for a unit that has no width at all.
    """
    llm = next(unit for unit in demand.units if unit.name == LLM)
    others = [unit for unit in demand.units if unit.name != LLM]
    limit = usable_bytes(demand.cluster) if fitting else np.inf
    columns = _of_llm(demand, llm, limit)
    combinations = _combinations(demand, others)
    if not columns.size or not combinations:
        return
    exchanges = {unit.name: _Exchanges(demand, unit) for unit in demand.units}
    left = demand.cluster.num_gpus - columns.prod(axis=0)
    replicas = [_dealt(demand, others, combination, left) for combination in combinations]
    most = demand.global_batch
    for count in sorted({*(k for k in MICROBATCHES if k <= most), *_one_sample_each(demand, columns[0])}):
        rows = columns[0] * count <= demand.global_batch
        of_llm = columns[:, rows]
        dealt = [
            _beside(demand, others, combination, (of_llm, left[rows], of_others[:, rows]), count, limit)
            for combination, of_others in zip(combinations, replicas, strict=True)
        ]
        parts = [part for part in dealt if part is not None]
        if parts:
            joined = [{unit: np.concatenate([part[i][unit] for part in parts]) for unit in demand.unit_names} for i in range(3)]
            yield _estimated(demand, exchanges, count, *joined)


def _of_llm(demand: Demand, llm: UnitDemand, limit: float) -> Ints:
    """Return the (3, m) dp, tp and pp of all layouts of the LLM that leave the other units a GPU each and hold its state."""
    free = demand.cluster.num_gpus - (len(demand.units) - 1)
    rows = [
        (dp, tp, pp)
        for tp in widths(llm, demand.cluster.gpus_per_node)
        for pp in stage_choices(llm, demand.chunks)
        for dp in llm.only_dp or range(1, free + 1)
        if dp <= min(free // (tp * pp), demand.global_batch)
    ]
    columns = np.array(rows, np.int64).reshape(-1, 3).T
    kept: Ints = columns[:, state_bytes(llm, *columns) <= limit]
    return kept


def _one_sample_each(demand: Demand, replicas: Ints) -> set[int]:
    """Return the numbers of microbatches of one sample each, where they divide the global batch; the smallest few of them."""
    counts = {demand.global_batch // int(dp) for dp in np.unique(replicas) if demand.global_batch % dp == 0}
    return set(sorted(counts)[:8])


def _combinations(demand: Demand, others: Sequence[UnitDemand]) -> list[tuple[tuple[int, int, int], ...]]:
    """Return (tp, pp, dp) of the units beside the LLM, in all combinations, or those of few stages where these are too many.

    dp: a number of replicas that is allowed, or 0 where `_dealt` says it. Several units on few GPUs have every number.
    """
    gpus, most = demand.cluster.num_gpus, _MOST_STAGES_BESIDE
    is_listed = len(others) > 1
    while True:
        choices = [
            [
                (tp, pp, dp)
                for tp in widths(unit, demand.cluster.gpus_per_node)
                for pp in stage_choices(unit, demand.chunks, most)
                for dp in unit.only_dp or (range(1, gpus // (tp * pp) + 1) if is_listed else (0,))
            ]
            for unit in others
        ]
        number = int(np.prod([len(choice) for choice in choices]))
        if is_listed and number > _MOST_LISTED:
            is_listed = False
        elif is_listed or number <= _MOST_COMBINATIONS or most == 1:
            return list(itertools.product(*choices))
        else:
            most -= 1


def _dealt(demand: Demand, others: Sequence[UnitDemand], combination: Sequence[tuple[int, int, int]], left: Ints) -> Ints:
    """Return (u, m) the replicas of the units beside the LLM on (m,) GPUs that it leaves.

    Each has one at least, even where that is too many. They are in proportion to what the units' stages take. Rounding down
    leaves GPUs for one more of some: the slowest that there is room for. Where a single replica is more than a unit's share, the
    unit of most replicas has fewer.
    """
    if not others:
        return np.zeros((0, left.size), np.int64)
    stage_s = np.array(
        [demand.step_s(unit, tp) * float(time_share(unit, pp)) for unit, (tp, pp, _) in zip(others, combination, strict=True)]
    )[:, None]
    sizes = np.array([tp * pp for tp, pp, _ in combination], np.int64)[:, None]
    given = np.array([dp for _, _, dp in combination], np.int64)[:, None]
    is_free, units = given == 0, np.arange(len(others))[:, None]
    work = float((stage_s * sizes)[is_free].sum())
    rate = (left - int((given * sizes).sum())) / work if work > 0 else left * 0.0
    replicas: Ints = np.where(is_free, np.maximum(1, (rate * stage_s).astype(np.int64)), given)
    may_take = np.broadcast_to(is_free, replicas.shape)
    for _ in others:
        lacking = np.maximum(0, (replicas * sizes).sum(axis=0) - left)
        gives = is_free & (units == np.where(is_free, replicas, 0).argmax(axis=0))
        replicas = np.where(gives, np.maximum(1, replicas - -(-lacking // sizes)), replicas)
    for _ in others:
        room = left - (replicas * sizes).sum(axis=0)
        taking_s = np.where(may_take & (sizes <= room), stage_s / replicas, 0.0)
        takes = (units == taking_s.argmax(axis=0)) & (taking_s > 0)
        replicas, may_take = replicas + takes, may_take & ~takes
    return replicas


def _beside(
    demand: Demand,
    others: Sequence[UnitDemand],
    combination: Sequence[tuple[int, int, int]],
    beside: tuple[Ints, Ints, Ints],
    count: int,
    limit: float,
) -> tuple[dict[str, Ints], dict[str, Ints], dict[str, Ints]] | None:
    """Return dp, tp, pp by unit, (m,) each, of all units in those layouts that the GPUs and their memory hold; None if none fits.

    beside: (3, m) dp, tp and pp of the LLM, the (m,) GPUs that it leaves, and the (u, m) replicas of the others.
    """
    of_llm, left, dealt = beside
    most = demand.global_batch // count  # replicas beyond the samples of a microbatch of all replicas would have none
    replicas = np.minimum(dealt, most)
    sizes = np.array([tp * pp for tp, pp, _ in combination])
    idle = left - (replicas * sizes[:, None]).sum(axis=0)
    fits = (idle >= 0) & (max((dp for _, _, dp in combination), default=0) <= most)
    for unit, of_unit, (w, s, dp) in zip(others, replicas, combination, strict=True):
        fits &= state_bytes(unit, of_unit, w, s) <= limit
        if dp and unit.only_dp is None:
            fits &= (idle < w * s) | (of_unit == most)  # else it is slower than with a replica more
    start = np.zeros_like(left)
    sizes_of = dict(zip((unit.name for unit in others), zip(replicas, combination, strict=True), strict=True))
    found: tuple[dict[str, Ints], dict[str, Ints], dict[str, Ints]] = ({}, {}, {})
    for unit in demand.units:
        of_unit, width, stages = of_llm if unit.name == LLM else _columns(*sizes_of[unit.name])
        fits &= start % width == 0  # slices of a layer lie in one node
        start = start + of_unit * width * stages
        for column, values in zip(found, (of_unit, width, stages), strict=True):
            column[unit.name] = values
    if not fits.any():
        return None
    dps, tps, pps = ({unit: values[fits] for unit, values in column.items()} for column in found)
    return dps, tps, pps


def _columns(replicas: Ints, size: tuple[int, int, int]) -> tuple[Ints, Ints, Ints]:
    return replicas, np.full_like(replicas, size[0]), np.full_like(replicas, size[1])


class _Exchanges:
    """The seconds in which replicas of a unit gather its weights, of all grids that it may have: once for all microbatches."""

    def __init__(self, demand: Demand, unit: UnitDemand) -> None:
        tp = widths(unit, demand.cluster.gpus_per_node)
        pp = stage_choices(unit, demand.chunks)
        dp = np.arange(1, min(demand.cluster.num_gpus, demand.global_batch) + 1)
        of_widths, of_stages = np.array(tp)[:, None, None], np.array(pp)[:, None]
        self._seconds = exchange_s(unit, demand.cluster, dp, of_widths, of_stages)
        self._width_at, self._stages_at = np.zeros(max(tp) + 1, np.int64), np.zeros(max(pp) + 1, np.int64)
        self._width_at[tp], self._stages_at[pp] = np.arange(len(tp)), np.arange(len(pp))

    def of(self, dp: Ints, tp: Ints, pp: Ints) -> Floats:
        """Return them for grids, given as columns."""
        seconds: Floats = self._seconds[self._width_at[tp], self._stages_at[pp], dp - 1]
        return seconds


def _estimated(
    demand: Demand,
    exchanges: Mapping[str, _Exchanges],
    count: int,
    dp: Mapping[str, Ints],
    tp: Mapping[str, Ints],
    pp: Mapping[str, Ints],
) -> Layouts:
    """Estimate the steps as `estimate.step_s` does for one candidate (overlapped), but for the microbatch that passes all stages.

    That is the one with the largest sample, if it takes longer than a mean microbatch: jobs that take p(k) each on every machine
    of a row take the sum of p in all and, once for every further machine, the longest p.
    """
    zeros = np.zeros(dp[LLM].size)
    slowest, exchange, update = zeros, zeros, zeros
    longest, rest = np.zeros((2, zeros.size)), np.zeros((2, zeros.size))  # with the largest sample, and with mean ones
    for unit in demand.units:
        name = unit.name
        samples = demand.global_batch / count / dp[name]
        of_sample, of_largest = np.zeros(zeros.size), np.zeros(zeros.size)
        for width, forward_s in unit.forward_s.items():
            of_sample[tp[name] == width] = demand.step_s(unit, width)
            of_largest[tp[name] == width] = float(forward_s.max()) * (1 + unit.backward_factor)
        fixed_s = sum(unit.microbatch_s)
        stage = (samples * of_sample + fixed_s) * time_share(unit, pp[name])
        slowest = np.maximum(slowest, stage)
        whole = np.stack((np.maximum(samples * of_sample, of_largest), samples * of_sample)) + fixed_s
        sizes = dp[name], tp[name], pp[name]
        update = np.maximum(update, unit_update_s(unit, *sizes))
        one_s = exchanges[name].of(*sizes)
        exposed = exposed_of(unit, one_s, pp[name], stage / (1 + unit.backward_factor))
        exchange = np.maximum(exchange, sum(exposed))
        whole = whole + (pp[name] - (name == demand.unit_names[-1])) * hop_s(unit, demand.cluster, samples)
        if name in (LLM, GENERATOR):
            rest = rest + whole
        else:
            longest = np.maximum(longest, whole)
    step_s, of_means_s = (longest + rest) / demand.chunks + (count - 1) * slowest + exchange + update
    return Layouts(microbatches=count, dp=dp, tp=tp, pp=pp, step_s=step_s, of_means_s=of_means_s)
