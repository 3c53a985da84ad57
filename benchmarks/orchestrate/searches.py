"""The published searches for a placement: how long ours take for the same sizes, and what each finds, by the formula."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.orchestrate.cornstarch_models import GLOBAL_BATCH, GPUS, MICROBATCH, PUBLISHED, SLICES, frozen_demand
from benchmarks.orchestrate.disttrain_models import MEGATRON_STAGES, demand_of
from benchmarks.planning.inputs import FAMILIES
from benchmarks.report import Rival, Row, Section, at_least, at_most
from benchmarks.timing import progress, time_calls
from headrace.reorder_service.planning.cost_model.stable_batch import (
    NUM_TRIALS,
    distance_to_edge,
    failure_bound,
    seen_divisions,
    smallest_stable_batch,
)
from headrace.reorder_service.planning.execution import BACKWARD_FACTOR
from headrace.reorder_service.planning.orchestration.candidate import Candidate, UnitGrid
from headrace.reorder_service.planning.orchestration.demand import Demand
from headrace.reorder_service.planning.orchestration.estimate import step_s
from headrace.reorder_service.planning.orchestration.searches import SEARCHES, disttrain_exact, disttrain_relaxed, megatron
from headrace.reorder_service.planning.orchestration.searches.cornstarch import divide
from headrace.reorder_service.planning.orchestration.stage_cuts import time_share

Search = Callable[[Demand], list[Candidate]]

BUDGET_S = 2.0
SEARCH_GOAL_MS, STABLE_GOAL_S = 100.0, 1.0
# DistTrain, table 2: MLLM-72B by GPUs, global batch, ms.
TABLE_2 = ((1296, 1920, 922.0), (648, 960, 641.0), (324, 480, 441.0), (112, 240, 133.0))
# DistTrain, section 8.2: models with the global batches of figures 17, 19 and 20, on 96 of the "up to 98" GPUs: whole nodes.
MICROBENCHMARK = (("MLLM-9B", 128), ("MLLM-15B", 64), ("MLLM-72B", 40))
MICRO_GPUS = 96
LARGE_GPUS, LARGE_BATCH = 1296, 1920  # section 8.1
FROZEN = {
    "all frozen": ("encoder", "llm", "generator"),
    "encoder learns": ("llm", "generator"),
    "llm learns": ("encoder", "generator"),
    "generator learns": ("encoder", "llm"),
}
STABLE_SAMPLES, STABLE_GPUS = 100_000, 16
TABLE_SIZES = (1, 4, 16, 64, 256)


def sections(*, quick: bool) -> Iterator[Section]:
    """Times of DistTrain's and Entrain's searches, and the placements that all find for DistTrain's experiments."""
    yield _time_section(quick=quick)
    yield _stable_section()
    yield _trials_section()
    yield _gain_section()
    yield _frozen_section()
    yield _aware_section()


def _time_section(*, quick: bool) -> Section:
    """Table 2. `worth=1`: only the fastest placement, as the paper's algorithm returns."""
    rows = []
    for gpus, batch, published in TABLE_2:
        demand = demand_of("MLLM-72B", gpus, batch)
        for module in (disttrain_exact, disttrain_relaxed):
            progress(f"searches: {module.NAME}, {gpus} GPUs")
            call = functools.partial(module.search, demand, worth=1.0)
            timing = time_calls(call, budget_s=BUDGET_S / 4 if quick else BUDGET_S)
            best = call()[0]
            rows.append(
                Row(
                    name=f"{module.NAME}, {gpus} GPUs, global batch {batch}",
                    value=timing.best_s * 1e3,
                    unit="ms",
                    rival=Rival(value=published, source="DistTrain, table 2"),
                    goal=at_most(SEARCH_GOAL_MS),
                    detail=f"{timing.detail}; {_layout(best)}, {step_s(demand, best):.4g} s a step by the formula",
                )
            )
    return Section(title="search for MLLM-72B's placement, encoder and generator on GPUs of their own; warm, one core", rows=rows)


def _stable_section() -> Section:
    """Alg. 2 on as many samples as a survey of a data set has, on the shares of a division into stages of one GPU."""
    rng = np.random.default_rng(7)
    seconds = rng.lognormal(0.0, 0.8, (2, STABLE_SAMPLES)) * np.array([[0.6], [1.0]])
    progress("searches: b_min")
    call = functools.partial(smallest_stable_batch, seconds, STABLE_GPUS)
    timing = time_calls(call, budget_s=BUDGET_S / 2)
    edge = distance_to_edge(seconds, STABLE_GPUS)
    row = Row(
        name=f"b_min, {STABLE_SAMPLES:,} samples, {STABLE_GPUS} GPUs",
        value=timing.best_s,
        unit="s",
        goal=at_most(STABLE_GOAL_S),
        detail=f"{timing.detail}; b_min {call()}, {edge:.3f} of the work from the next division, "
        f"error at most {failure_bound(0, NUM_TRIALS):.3f} with 95 % confidence",
    )
    return Section(title="smallest stable batch (Entrain, Alg. 2); one core", rows=[row])


def _trials_section() -> Section:
    """The rows of Entrain's tables 4.2 and C.2 to C.8, for the bundled cost tables, which are not Entrain's profiles."""
    rows = []
    for family in FAMILIES:
        costs = family.table().costs
        seconds = np.stack([costs[unit] for unit in family.stages]) * (1 + BACKWARD_FACTOR)
        for size in TABLE_SIZES:
            seen = seen_divisions(seconds, STABLE_GPUS, size, seed=1)
            failures = NUM_TRIALS + 1 - max(seen.values())
            rows.append(
                Row(
                    name=f"{family.name}, batches of {size}",
                    value=float(len(seen)),
                    unit="divisions",
                    detail=f"{', '.join(':'.join(map(str, one)) for one in seen)}; "
                    f"{'pass' if len(seen) == 1 else 'fail'}, error at most {failure_bound(failures, NUM_TRIALS):.3f}",
                )
            )
    return Section(title=f"divisions of {STABLE_GPUS} GPUs, encoder : LLM, seen in {NUM_TRIALS + 1} batches", rows=rows)


def _gain_section() -> Section:
    """Figure 17: utilisation of the GPUs that are used, over the baselines'. Published: 1.3 to 2.7 over both."""
    rows = []
    for model, batch in MICROBENCHMARK:
        demand = demand_of(model, MICRO_GPUS, batch)
        best = disttrain_exact.search(demand, worth=1.0)[0]
        rows.append(_gain_row(f"{model}, over megatron as published", demand, _published_megatron(model), best))
        for name in ("megatron", "ratio", "disttrain", "cornstarch", "entrain"):
            progress(f"searches: {model}, {name}")
            rows.append(_gain_row(f"{model}, over {name}", demand, SEARCHES[name], best))
    for model in MEGATRON_STAGES:
        demand = demand_of(model, LARGE_GPUS, LARGE_BATCH)
        best = disttrain_exact.search(demand, worth=1.0)[0]
        name = f"{model}, {LARGE_GPUS} GPUs, over megatron as published (figure 15: 1.7 to 2.8; 1.2 for 72B)"
        rows.append(_gain_row(name, demand, _published_megatron(model), best))
    return Section(
        title=f"SIMULATED by the formula: how much better disttrain-exact uses {MICRO_GPUS} GPUs (figure 17: 1.3 to 2.7)",
        rows=rows,
    )


def _frozen_section() -> Section:
    """Figure 19. Published: 1.4 to 2.9 over Megatron."""
    rows = []
    for (model, batch), (name, frozen) in itertools.product(MICROBENCHMARK, FROZEN.items()):
        progress(f"searches: {model}, {name}")
        demand = demand_of(model, MICRO_GPUS, batch, frozen)
        best = disttrain_exact.search(demand, worth=1.0)[0]
        rows.append(_gain_row(f"{model}, {name}", demand, _published_megatron(model), best))
    return Section(
        title="SIMULATED by the formula: the same over megatron as published, with units frozen and projectors learning "
        "(figure 19: 1.4 to 2.9)",
        rows=rows,
    )


def _published_megatron(model: str) -> Search:
    return functools.partial(megatron.search, llm_stages=MEGATRON_STAGES[model])


def _gain_row(name: str, demand: Demand, baseline: Search, best: Candidate) -> Row:
    other = baseline(demand)[0]
    gain = step_s(demand, other) * other.gpus / (step_s(demand, best) * best.gpus)
    return Row(
        name=f"SIMULATED {name}",
        value=gain,
        unit="x",
        detail=f"throughput {step_s(demand, other) / step_s(demand, best):.3g} x; {_layout(best)} beside {_layout(other)}",
    )


def _aware_section() -> Section:
    """Table 3.2: six stages of four slices, levelled by forward and backward or by forward alone."""
    rows = []
    for sizes, published in PUBLISHED.items():
        demand = frozen_demand(sizes)
        aware, unaware = (_of_stages(demand, is_aware) for is_aware in (True, False))
        rows.append(
            Row(
                name=f"SIMULATED MLLM-{sizes}",
                value=step_s(demand, unaware) / step_s(demand, aware),
                unit="x",
                rival=Rival(value=published, source="Cornstarch, table 3.2"),
                goal=at_least(1.0),
                detail=f"{_layout(aware)} beside {_layout(unaware)}",
            )
        )
    return Section(
        title=f"SIMULATED by the formula: step of frozen-unaware over aware stages, {GPUS} A40, global batch {GLOBAL_BATCH}",
        rows=rows,
    )


def _of_stages(demand: Demand, is_aware: bool) -> Candidate:
    seconds = [demand.step_s(unit, SLICES) if is_aware else float(unit.forward_s[SLICES].mean()) for unit in demand.units]
    curves = [whole * time_share(unit, np.arange(1, unit.layers + 1)) for whole, unit in zip(seconds, demand.units, strict=True)]
    stages = zip(demand.unit_names, divide(curves, GPUS // SLICES), strict=True)
    grids = {name: UnitGrid(dp=1, tp=SLICES, pp=pp) for name, pp in stages}
    return Candidate(search="cornstarch", grids=grids, microbatches=GLOBAL_BATCH // MICROBATCH)


def _layout(candidate: Candidate) -> str:
    units = ", ".join(f"{name} {grid.dp}x{grid.tp}x{grid.pp}" for name, grid in candidate.grids.items())
    return f"{units} (dp x tp x pp, {candidate.gpus} GPUs)"
