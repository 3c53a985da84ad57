"""`python -m benchmarks.colocated`: how long ranks that have all units wait for each other under a plan. Nothing is trained.

The time of a step is a formula of the plan: over the microbatches, the sum of the slowest rank's seconds (ranks meet at every
microbatch, as FSDP's do). Every row is the mean over the tables of its time over the even share, the seconds of the whole batch
divided by the ranks, or the longest sample where that is more.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.planning.inputs import CHARTQA, COCOQA, LLAVA, SEED, SYNTHCHART, Family, resampled
from benchmarks.report import RESULTS, Report, Rival, Row, Section, at_most
from benchmarks.timing import progress, time_calls
from headrace.plan import Topology
from headrace.reorder_service.planning import STRATEGIES, warm_up
from headrace.reorder_service.planning.batch import Batch, Slots, make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.search.number_partition import descending, lpt
from headrace.reorder_service.planning.strategies import colocated, run_strategy

FAMILIES = (SYNTHCHART, CHARTQA, COCOQA, LLAVA)
SHAPES = ((8, 4, 8, 1.02), (64, 2, 8, 1.02), (1024, 1, 12, 1.005))
"""Ranks, microbatches, samples a microbatch, and the goal of the time over the even share."""
TIGHT = 1.15
"""A limit of tokens: the mean of a microbatch times this."""
LARGE_RANKS, LARGE_SAMPLES, LARGE_GOAL_MS = 2_560, 60, 10.0
BUDGET_S = 0.6


def main() -> None:
    """Measure, print, write. The verdict is in the table: a missed goal is no error of this program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.colocated", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where colocated.json goes")
    options = parser.parse_args()
    progress("compiling or loading the kernels")
    warm_up()
    report = Report(
        benchmark="colocated",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        quick=options.quick,
        sections=[*_quality(), _limits(), _speed()],
    )
    report.write(options.results / "colocated.json")
    report.show()


def _quality() -> Iterator[Section]:
    for ranks, microbatches, per, goal in SHAPES:
        progress(f"quality: {ranks} ranks x {microbatches}")
        batches = [_batch(family, ranks, microbatches, per) for family in FAMILIES]
        rivals = {
            "arrival order": _named("random"),
            "LPT over all microbatches": _lpt,
            "auto, planned as a pipeline": _as_pipeline,
        }
        ours = _over_bound(batches, colocated.plan_slots)
        rows = [
            Row(
                name=f"ours, beside {name}",
                value=ours,
                unit="x even share",
                rival=Rival(value=_over_bound(batches, strategy), source=name),
                goal=at_most(goal),
            )
            for name, strategy in rivals.items()
        ]
        title = f"Step over the even share: {ranks:,} ranks x {microbatches}, {per} samples each, {len(FAMILIES)} tables"
        yield Section(title=title, rows=rows)


def _limits() -> Section:
    progress("limits of tokens")
    rows = []
    for ranks, microbatches, per, goal in SHAPES[:2]:
        batches = [_batch(family, ranks, microbatches, per, tight=True) for family in FAMILIES]
        fullest = max(_fullest_share(batch) for batch in batches)
        rows += [
            Row(name=f"{ranks} x {microbatches}: fullest microbatch over max_tokens", value=fullest, unit="x", goal=at_most(1.0)),
            Row(
                name=f"{ranks} x {microbatches}: step over the even share",
                value=_over_bound(batches, colocated.plan_slots),
                unit="x even share",
                goal=at_most(goal),
            ),
        ]
    return Section(title=f"With max_tokens, {TIGHT:g} times a microbatch's mean", rows=rows)


def _speed() -> Section:
    progress("speed")
    rows = []
    for ranks, microbatches, per in ((64, 2, 8), (LARGE_RANKS, 1, LARGE_SAMPLES)):
        batch = _batch(SYNTHCHART, ranks, microbatches, per)
        timing = time_calls(partial(colocated.plan_slots, batch), budget_s=BUDGET_S)
        name = f"a plan for {ranks:,} ranks x {microbatches}, {per} samples each"
        rows.append(Row(name=name, value=timing.best_s * 1e3, unit="ms", goal=at_most(LARGE_GOAL_MS), detail=timing.detail))
    return Section(title="Time of planning, one thread", rows=rows)


def _batch(family: Family, ranks: int, microbatches: int, per: int, *, tight: bool = False) -> Batch:
    table = resampled(family.table(), ranks * microbatches * per, SEED)
    tokens = np.ceil(1000 * table.costs["llm"] / table.costs["llm"].mean()).astype(np.int64)  # in proportion to the LLM's seconds
    limit = max(int(tokens.sum() * TIGHT / (ranks * microbatches)), int(tokens.max())) if tight else None
    topology = Topology(replicas=ranks, microbatches=microbatches, stages=dict.fromkeys(family.stages, 1))
    execution = Execution(colocated="microbatch", max_tokens=limit)
    return make_batch(table.sample_ids, table.costs, topology, SEED, execution=execution, tokens=tokens)


def _over_bound(batches: list[Batch], strategy: Callable[[Batch], Slots]) -> float:
    predicted = [colocated.predict(batch, strategy(batch)) for batch in batches]
    return float(np.mean([each.iteration_s / each.lower_bound_s for each in predicted]))


def _fullest_share(batch: Batch) -> float:
    assert batch.tokens is not None
    assert batch.execution.max_tokens is not None
    slots = colocated.plan_slots(batch)[0]
    return float(np.bincount(slots, weights=batch.tokens).max() / batch.execution.max_tokens)


def _named(strategy: str) -> Callable[[Batch], Slots]:
    assert strategy in STRATEGIES
    return lambda batch: run_strategy(strategy, batch)[1]


def _lpt(batch: Batch) -> Slots:
    """The plain greedy rule over all microbatches, which are then met in the order of their load."""
    seconds = colocated.rank_seconds(batch)
    bins = lpt(seconds, descending(seconds), batch.num_slots)
    heaviest = descending(np.bincount(bins, weights=seconds, minlength=batch.num_slots).astype(np.float64))
    rank = np.empty(batch.num_slots, np.int64)
    rank[heaviest] = np.arange(batch.num_slots)
    ranks, microbatches = batch.topology.replicas, batch.topology.microbatches
    slots = rank[bins] % ranks * microbatches + rank[bins] // ranks
    return np.stack([slots] * len(batch.units))


def _as_pipeline(batch: Batch) -> Slots:
    """What `auto` plans where it is not told that ranks have all units. A rank works on what the LLM has there."""
    pipeline = make_batch(
        batch.sample_ids, dict(zip(batch.units, batch.costs, strict=True)), batch.topology, SEED, execution=Execution()
    )
    slots = run_strategy("auto", pipeline)[1]
    return np.stack([slots[-1]] * len(batch.units))


if __name__ == "__main__":
    main()
