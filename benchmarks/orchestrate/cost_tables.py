"""Headrace's search beside the papers' on the bundled cost tables, and how long all searches take together.

The tables have costs in no unit of time. They become those of a 3b LLM of 1,024 tokens a sample in the mean, and of encoders of
published sizes, with activation checkpointing, on as many positions as take their share of the costs: up to 26,000 of a sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

import numpy as np

from benchmarks.planning.inputs import FAMILIES, OMNI, SEED, Family
from benchmarks.report import Row, Section, at_least, at_most
from benchmarks.timing import progress
from headrace.cli.experiment.disttrain_models import counted_unit
from headrace.model_shape import AUDIO_SHAPES, LLM_SHAPES, VISION_SHAPES
from headrace.plan import LLM
from headrace.reorder_service.planning.orchestration.candidate import Candidate
from headrace.reorder_service.planning.orchestration.cluster import CLUSTERS
from headrace.reorder_service.planning.orchestration.demand import Demand
from headrace.reorder_service.planning.orchestration.headrace_search import Found, search
from headrace.reorder_service.planning.orchestration.judgement import in_words, seconds_beside
from headrace.reorder_service.planning.orchestration.searches import SEARCHES

TABLES = (*FAMILIES, OMNI)
SIZES = (64, 1024)
SAMPLES_PER_GPU, TOKENS, SEGMENT = 4, 1024, 1024
GAIN_GOAL, TIME_GOAL_S, TIMED_GPUS = 1.1, 10.0, 1024
SHAPES = {
    "encoder": VISION_SHAPES["vit-h"],
    "vision": VISION_SHAPES["vit-h"],
    "audio": AUDIO_SHAPES["whisper-medium"],
    LLM: LLM_SHAPES["llama3-3b"],
}


def table_demand(family: Family, gpus: int) -> Demand:
    """The model of a cost table on so many A40."""
    cluster = CLUSTERS["a40"].of_gpus(gpus)
    costs = family.table().costs

    def seconds_of_position(unit: str) -> float:
        return float(counted_unit(unit, SHAPES[unit], np.ones(1), SEGMENT, cluster).forward_s[1][0])

    scale = TOKENS * seconds_of_position(LLM) / float(costs[LLM].mean())
    units = tuple(
        counted_unit(unit, SHAPES[unit], column * scale / seconds_of_position(unit), SEGMENT, cluster, checkpointing=unit != LLM)
        for unit, column in costs.items()
    )
    return Demand(units=units, cluster=cluster, global_batch=SAMPLES_PER_GPU * gpus)


def all_searches(demand: Demand, *, num_batches: int) -> tuple[Found, float]:
    """What the searches find, and the seconds of all of them together."""
    started_s = perf_counter()
    answers: dict[str, Candidate] = {}
    for name, run in SEARCHES.items():
        try:
            answers[name] = run(demand)[0]
        except ValueError:
            continue
    found = search(demand, answers, seed=SEED, num_batches=num_batches)
    return found, perf_counter() - started_s


def sections(*, quick: bool) -> Iterator[Section]:
    """Gains on each table and cluster, and the times of the searches on the largest."""
    sizes, num_batches = (SIZES[:1], 4) if quick else (SIZES, 20)
    all_searches(table_demand(FAMILIES[0], 8), num_batches=1)  # compiles the kernels
    gains, times = [], []
    for gpus in sizes:
        for family in TABLES:
            progress(f"cost tables: {family.name}, {gpus} GPUs")
            demand = table_demand(family, gpus)
            found, seconds = all_searches(demand, num_batches=num_batches)
            gains.append(_gain_row(f"{family.name}, {gpus} GPUs", found))
            times.append(
                Row(
                    name=f"{family.name}, {gpus} GPUs",
                    value=seconds,
                    unit="s",
                    goal=at_most(TIME_GOAL_S) if gpus == TIMED_GPUS else None,
                    detail=f"{found.num_estimated:,} placements estimated, {found.num_simulated:,} steps simulated",
                )
            )
    samples = f"{SAMPLES_PER_GPU} samples a GPU, mean of {num_batches} global batches"
    yield Section(
        title="SIMULATED samples a second of headrace's placement over those of the best of the papers' searches on A40: goal on "
        f"three of the {len(TABLES)} tables; {samples}",
        rows=gains,
    )
    yield Section(title="all searches together, with the judge's simulations; warm, one core", rows=times)


def _gain_row(name: str, found: Found) -> Row:
    fitting = {search: judged for search, judged in found.answers.items() if judged.fits}
    if not fitting:
        return Row(name=f"SIMULATED {name}", value=float("inf"), unit="x", detail="no paper's placement fits the memory")
    best = found.best
    nearest, judged = min(fitting.items(), key=lambda item: seconds_beside(item[1], best))
    judged_s = seconds_beside(judged, best)
    apart = found.of_placements["disaggregated"]
    return Row(
        name=f"SIMULATED {name}",
        value=judged_s / best.step_s,
        unit="x",
        goal=at_least(GAIN_GOAL),
        detail=f"{best.step_s:.4g} s a step: {in_words(best.candidate)}; {nearest} {judged_s:.4g} s: "
        f"{in_words(judged.candidate)}; {judged_s / seconds_beside(apart, best):.3g} x with GPUs of each unit's own: "
        f"{in_words(apart.candidate)}",
    )
