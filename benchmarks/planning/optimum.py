"""How far plans of small global batches are from the true optimum, which is found by search or by integer programming."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from benchmarks.planning import exhaustive
from benchmarks.planning.inputs import FAMILIES, plan_table, resampled
from benchmarks.report import Row, Section
from benchmarks.timing import progress
from headrace.cli.costs.cost_table import CostTable
from headrace.plan import Topology
from headrace.reorder_service.planning import STRATEGIES
from headrace.reorder_service.planning.batch import slots_of

Floats = NDArray[np.float64]

BINS, SAMPLES = 4, 12
TINY_SAMPLES = 6
INSTANCES, QUICK_INSTANCES = 20, 8
_TIME_LIMIT_S = 20.0


def sections(*, quick: bool) -> Iterator[Section]:
    """Heaviest load with one unit and with two; step time."""
    instances = QUICK_INSTANCES if quick else INSTANCES
    for units in (("llm",), ("encoder", "llm")):
        progress(f"optimum: heaviest load, {len(units)} unit(s)")
        yield _load_section(units, instances)
    progress("optimum: step time")
    yield _time_section(instances)


def _load_section(units: Sequence[str], instances: int) -> Section:
    topology = Topology(replicas=BINS, microbatches=1, stages=dict.fromkeys(units, 1))
    gaps: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    for seed in range(instances):
        table = _drawn(SAMPLES, seed, units)
        optimum = least_load(normalised(table))
        for strategy in STRATEGIES:
            gaps[strategy].append(_heaviest(strategy, table, topology) / optimum - 1)
    what = "of one unit" if len(units) == 1 else "of two units, a sample's both in one place"
    return Section(
        title=f"heaviest load {what}, above the optimum (HiGHS): n={SAMPLES}, D={BINS}, K=1, {instances} batches",
        rows=list(_gap_rows(gaps)),
    )


def _time_section(instances: int) -> Section:
    gaps: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    for seed in range(instances):
        table = _drawn(TINY_SAMPLES, seed, tuple(exhaustive.TOPOLOGY.stages))
        optimum = exhaustive.least_time_s(table)
        for strategy in STRATEGIES:
            gaps[strategy].append(exhaustive.strategy_time_s(strategy, table) / optimum - 1)
    return Section(
        title=f"1F1B step time above the best of all plans, deferring ones too: n={TINY_SAMPLES}, D=1, K=3, "
        f"encoder 1 + llm 2 stages, {instances} batches",
        rows=list(_gap_rows(gaps)),
    )


def _drawn(num_samples: int, seed: int, units: Sequence[str]) -> CostTable:
    """A small batch of one of the four cost families, by turns."""
    drawn = resampled(FAMILIES[seed % len(FAMILIES)].table(), num_samples, seed)
    return CostTable(sample_ids=drawn.sample_ids, costs={unit: drawn.costs[unit] for unit in units})


def _gap_rows(gaps: Mapping[str, Sequence[float]]) -> Iterator[Row]:
    """The mean of a strategy's gaps, with the worst one beside it."""
    for strategy, values in gaps.items():
        percent = 100 * np.array(values)
        yield Row(name=f"mean gap, {strategy}", value=float(percent.mean()), unit="%", detail=f"worst {percent.max():.3g} %")


def normalised(table: CostTable) -> Floats:
    """(U, n) costs in units of the mean bin's load."""
    costs = np.stack(list(table.costs.values()))
    weights: Floats = costs / costs.sum(axis=1, keepdims=True) * BINS
    return weights


def _heaviest(strategy: str, table: CostTable, topology: Topology) -> float:
    slots = slots_of(plan_table(strategy, table, topology), table.sample_ids)
    return max(float(np.bincount(slot, weights=w).max()) for slot, w in zip(slots, normalised(table), strict=True))


def least_load(weights: Floats) -> float:
    """The least possible heaviest load over BINS bins and all units, every sample in one bin; weights: (U, n).

    Variables: x[i, b] in {0, 1}, sample i is in bin b, and the heaviest load. Bins are alike, so sample i may be fixed to
    the first i + 1 of them. Raises RuntimeError if the solver proves no optimum in its time.
    """
    num_units, num_samples = weights.shape
    heaviest = num_samples * BINS
    column = np.arange(heaviest).reshape(num_samples, BINS)
    once = coo_array((np.ones(heaviest), (np.repeat(np.arange(num_samples), BINS), column.ravel())), (num_samples, heaviest + 1))
    load = np.zeros((num_units * BINS, heaviest + 1))
    for u in range(num_units):
        for b in range(BINS):
            load[u * BINS + b, column[:, b]] = weights[u]
    load[:, heaviest] = -1.0
    upper = np.append((np.arange(BINS) <= np.arange(num_samples)[:, None]).astype(float).ravel(), np.inf)
    solution = milp(
        c=np.append(np.zeros(heaviest), 1.0),
        integrality=np.append(np.ones(heaviest), 0),
        bounds=Bounds(0, upper),
        constraints=[LinearConstraint(once.tocsc(), 1, 1), LinearConstraint(load, -np.inf, 0)],
        options={"mip_rel_gap": 1e-9, "time_limit": _TIME_LIMIT_S},
    )
    if solution.status != 0:
        raise RuntimeError(f"HiGHS found no optimum of {num_samples} samples in {_TIME_LIMIT_S:g} s: {solution.message}")
    chosen = solution.x[:heaviest].reshape(num_samples, BINS).argmax(axis=1)
    return max(float(np.bincount(chosen, weights=w, minlength=BINS).max()) for w in weights)
