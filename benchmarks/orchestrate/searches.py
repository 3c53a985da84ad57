"""The published searches for a placement: how long ours take for the same sizes, and what each finds, by the formula."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import numpy as np

from benchmarks.planning.inputs import FAMILIES
from benchmarks.report import Rival, Row, Section, at_least, at_most
from benchmarks.timing import progress, time_calls
from headrace.cli.experiment.cornstarch_experiments import of_stages
from headrace.cli.experiment.cornstarch_models import GLOBAL_BATCH, GPUS, PUBLISHED, frozen_demand
from headrace.cli.experiment.disttrain_experiments import (
    FROZEN,
    LARGE_BATCH,
    LARGE_GPUS,
    MICRO_BATCHES,
    MICRO_GPUS,
    TABLE_2,
    Search,
    layout_in_words,
    published_megatron,
    throughput_gain,
    utilisation_gain,
)
from headrace.cli.experiment.disttrain_models import MEGATRON_STAGES, demand_of
from headrace.reorder_service.planning.cost_model.stable_batch import (
    NUM_TRIALS,
    distance_to_edge,
    failure_bound,
    seen_divisions,
    smallest_stable_batch,
)
from headrace.reorder_service.planning.execution import BACKWARD_FACTOR
from headrace.reorder_service.planning.orchestration.candidate import Candidate
from headrace.reorder_service.planning.orchestration.demand import Demand
from headrace.reorder_service.planning.orchestration.estimate import step_s
from headrace.reorder_service.planning.orchestration.searches import SEARCHES, disttrain_exact, disttrain_relaxed

BUDGET_S = 2.0
SEARCH_GOAL_MS, STABLE_GOAL_S = 100.0, 1.0
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
                    detail=f"{timing.detail}; {layout_in_words(best)}, {step_s(demand, best):.4g} s a step by the formula",
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
    for model, batch in MICRO_BATCHES.items():
        demand = demand_of(model, MICRO_GPUS, batch)
        best = disttrain_exact.search(demand, worth=1.0)[0]
        rows.append(_gain_row(f"{model}, over megatron as published", demand, published_megatron(model), best))
        for name in ("megatron", "ratio", "disttrain", "cornstarch", "entrain"):
            progress(f"searches: {model}, {name}")
            rows.append(_gain_row(f"{model}, over {name}", demand, SEARCHES[name], best))
    for model in MEGATRON_STAGES:
        demand = demand_of(model, LARGE_GPUS, LARGE_BATCH)
        best = disttrain_exact.search(demand, worth=1.0)[0]
        name = f"{model}, {LARGE_GPUS} GPUs, over megatron as published (figure 15: 1.7 to 2.8; 1.2 for 72B)"
        rows.append(_gain_row(name, demand, published_megatron(model), best))
    return Section(
        title=f"SIMULATED by the formula: how much better disttrain-exact uses {MICRO_GPUS} GPUs (figure 17: 1.3 to 2.7); "
        "dp x tp x pp",
        rows=rows,
    )


def _frozen_section() -> Section:
    """Figure 19. Published: 1.4 to 2.9 over Megatron."""
    rows = []
    for (model, batch), (name, frozen) in itertools.product(MICRO_BATCHES.items(), FROZEN.items()):
        progress(f"searches: {model}, {name}")
        demand = demand_of(model, MICRO_GPUS, batch, frozen)
        best = disttrain_exact.search(demand, worth=1.0)[0]
        rows.append(_gain_row(f"{model}, {name}", demand, published_megatron(model), best))
    return Section(
        title="SIMULATED by the formula: the same over megatron as published, with units frozen and projectors learning "
        "(figure 19: 1.4 to 2.9)",
        rows=rows,
    )


def _gain_row(name: str, demand: Demand, baseline: Search, best: Candidate) -> Row:
    other = baseline(demand)[0]
    faster = throughput_gain(demand, other, best)
    return Row(
        name=f"SIMULATED {name}",
        value=utilisation_gain(demand, other, best),
        unit="x",
        detail=f"throughput {faster:.3g} x; {layout_in_words(best)} beside {layout_in_words(other)}",
    )


def _aware_section() -> Section:
    """Table 3.2: six stages of four slices, levelled by forward and backward or by forward alone."""
    rows = []
    for sizes, published in PUBLISHED.items():
        demand = frozen_demand(sizes)
        aware, unaware = (of_stages(demand, is_aware=is_aware) for is_aware in (True, False))
        rows.append(
            Row(
                name=f"SIMULATED MLLM-{sizes}",
                value=step_s(demand, unaware) / step_s(demand, aware),
                unit="x",
                rival=Rival(value=published, source="Cornstarch, table 3.2"),
                goal=at_least(1.0),
                detail=f"{layout_in_words(aware)} beside {layout_in_words(unaware)}",
            )
        )
    return Section(
        title="SIMULATED by the formula: step of frozen-unaware over aware stages (dp x tp x pp), "
        f"{GPUS} A40, global batch {GLOBAL_BATCH}",
        rows=rows,
    )
