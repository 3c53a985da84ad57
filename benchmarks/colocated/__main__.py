"""`python -m benchmarks.colocated`: how long ranks that have all units wait for each other under a plan. Nothing is trained.

The time of a step is a formula of the plan (`colocated_step`). It stands over the even share, the seconds of the whole batch
divided by the ranks, or over the largest sample where that takes longer, which the row then says. Of several draws from a table,
the worst counts, for ours as for the rivals.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.planning.inputs import FAMILIES, GENERATOR, LLAVA, OMNI, SEED, SYNTHCHART, Family, resampled
from benchmarks.report import RESULTS, Report, Rival, Row, Section, at_most
from benchmarks.timing import Timing, progress, time_calls
from headrace.plan import Topology
from headrace.reorder_service.planning import plan, warm_up
from headrace.reorder_service.planning.batch import Batch, Slots, make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.search.number_partition import descending, lpt
from headrace.reorder_service.planning.simulation.colocated_step import predict, sample_seconds
from headrace.reorder_service.planning.strategies import AUTO, CANDIDATES, arrival, colocated, run_strategy
from headrace.transport.malloc import keep_freed_pages

TABLES = (*FAMILIES, OMNI, GENERATOR)
STRATEGY_TABLES = (SYNTHCHART, LLAVA)
SHAPES = ((8, 4, 8, 1.02), (64, 2, 8, 1.02), (1024, 1, 12, 1.005))
"""Ranks, microbatches, samples a microbatch, and the goal of the time over the even share."""
TIGHT = 1.05
"""A limit of tokens: the mean of a microbatch times this."""
LARGE_RANKS, LARGE_SAMPLES, LARGE_GOAL_MS = 2_560, 60, 10.0
BUDGET_S = 0.6

Meet = Literal["microbatch", "step"]


def main() -> None:
    """Measure, print, write. The verdict is in the table: a missed goal is no error of this program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.colocated", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one draw of each table instead of three")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where colocated.json goes")
    options = parser.parse_args()
    progress("compiling or loading the kernels")
    warm_up()
    draws = 1 if options.quick else 3
    report = Report(
        benchmark="colocated",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        quick=options.quick,
        sections=[*_quality(draws), _strategies(draws), *_limits(draws), _speed()],
    )
    report.write(options.results / "colocated.json")
    report.show()


def _quality(draws: int) -> Iterator[Section]:
    """Every table and shape where ranks meet at every microbatch; beside rivals, and where they meet once a step."""
    rivals: dict[str, Callable[[Batch], Slots]] = {
        "arrival order": arrival.plan_slots,
        "LPT": _lpt,
        "auto as a pipeline": _as_pipeline,
    }
    for ranks, microbatches, per, goal in SHAPES:
        rows = []
        for family in TABLES:
            progress(f"quality: {ranks} x {microbatches}, {family.name}")
            batches = [_batch(family, ranks, microbatches, per, "microbatch", seed=SEED + i) for i in range(draws)]
            ours, detail = _worst(batches, colocated.plan_slots), _largest(batches)
            for name, rival in rivals.items():
                rows.append(
                    Row(
                        name=f"{family.name}, beside {name}",
                        value=ours,
                        rival=Rival(value=_worst(batches, rival), source=name),
                        goal=at_most(goal),
                        detail=detail,
                    )
                )
            once = [_batch(family, ranks, microbatches, per, "step", seed=SEED + i) for i in range(draws)]
            rows.append(
                Row(
                    name=f"{family.name}, ranks meet once a step",
                    value=_worst(once, colocated.plan_slots),
                    rival=Rival(value=_worst(once, _as_pipeline), source="auto as a pipeline"),
                    goal=at_most(goal),
                    detail=detail,
                )
            )
        title = f"step over the even share: {ranks:,} ranks x {microbatches}, {per} samples each; ranks meet at every microbatch"
        yield Section(title=title, rows=rows)


def _strategies(draws: int) -> Section:
    """The plan of every strategy, as ranks run it that have all units. The strategies but `auto` plan for pipelines."""
    ranks, microbatches, per, goal = SHAPES[1]
    rows = []
    for family in STRATEGY_TABLES:
        progress(f"strategies: {family.name}")
        batches = [_batch(family, ranks, microbatches, per, "microbatch", seed=SEED + i) for i in range(draws)]
        for strategy in (*CANDIDATES, AUTO):
            if strategy == AUTO:
                rows.append(
                    Row(name=f"{family.name}, {strategy}", value=_worst(batches, colocated.plan_slots), goal=at_most(goal))
                )
            else:
                rows.append(
                    Row(name=f"{family.name}, {strategy}", value=_worst(batches, partial(_as_pipeline, strategy=strategy)))
                )
    title = (
        f"step over the even share, by strategy: {ranks:,} ranks x {microbatches}, {per} samples each, which meet at every one"
    )
    return Section(title=title, rows=rows)


def _limits(draws: int) -> Iterator[Section]:
    """Limits of tokens that hardly exceed the mean, or the longest sample if that is more."""
    for ranks, microbatches, per, _ in SHAPES:
        rows = []
        for family in TABLES:
            progress(f"limits: {ranks} x {microbatches}, {family.name}")
            batches = [_batch(family, ranks, microbatches, per, "microbatch", seed=SEED + i, tight=True) for i in range(draws)]
            fullest = max(_fullest_share(batch) for batch in batches)
            rows += [
                Row(name=f"{family.name}, fullest microbatch over max_tokens", value=fullest, goal=at_most(1.0)),
                Row(name=f"{family.name}, step", value=_worst(batches, colocated.plan_slots), detail=_largest(batches)),
            ]
        title = f"max_tokens {TIGHT:g} times a microbatch's mean: {ranks:,} ranks x {microbatches}, step over the even share"
        yield Section(title=title, rows=rows)


def _speed() -> Section:
    """OrchMLLM's largest job: the whole call of `plan` as the service makes it, and of it the choice of the places alone."""
    keep_freed_pages()  # as in a service that is running: else fresh pages of memory take a third of the time
    rows = []
    for family in (SYNTHCHART, OMNI):
        for ranks, microbatches, per in ((64, 2, 8), (LARGE_RANKS, 1, LARGE_SAMPLES)):
            progress(f"speed: {family.name}, {ranks} x {microbatches}")
            batch = _batch(family, ranks, microbatches, per, "microbatch")
            costs = dict(zip(batch.units, batch.costs, strict=True))
            call = partial(plan, "auto", batch.sample_ids, costs, batch.topology, SEED, execution=batch.execution)
            name = f"{family.name}, {ranks:,} ranks x {microbatches}, {per} samples each"
            rows.append(_ms_row(f"plan, {name}", time_calls(call, budget_s=BUDGET_S)))
            rows.append(_ms_row(f"of it the places, {name}", time_calls(partial(colocated.plan_slots, batch), budget_s=BUDGET_S)))
    return Section(title="time of planning; warm, one core", rows=rows)


def _ms_row(name: str, timing: Timing) -> Row:
    return Row(name=name, value=timing.best_s * 1e3, unit="ms", goal=at_most(LARGE_GOAL_MS), detail=timing.detail)


def _batch(
    family: Family, ranks: int, microbatches: int, per: int, meet: Meet, *, seed: int = SEED, tight: bool = False
) -> Batch:
    """Samples drawn from a table. Their tokens follow the LLM's seconds, but for a factor of 0.7 to 1.3."""
    table = resampled(family.table(), ranks * microbatches * per, seed)
    relative = table.costs["llm"] / table.costs["llm"].mean()
    blur = np.random.default_rng(seed).uniform(0.7, 1.3, relative.size)
    tokens = np.ceil(1000 * relative * blur).astype(np.int64)
    limit = max(int(tokens.sum() * TIGHT / (ranks * microbatches)), int(tokens.max())) if tight else None
    topology = Topology(replicas=ranks, microbatches=microbatches, stages=dict.fromkeys(family.stages, 1))
    execution = Execution(colocated=meet, max_tokens=limit)
    return make_batch(table.sample_ids, table.costs, topology, SEED, execution=execution, tokens=tokens)


def _worst(batches: list[Batch], strategy: Callable[[Batch], Slots]) -> float:
    """Return the largest time of a plan over the least possible one, of several batches."""
    predicted = [predict(batch, strategy(batch)) for batch in batches]
    return max(each.iteration_s / each.lower_bound_s for each in predicted)


def _largest(batches: list[Batch]) -> str:
    """Say where a single sample takes longer than the even share, which no plan can reach then."""
    drawn = [(sample_seconds(batch), batch.topology.replicas) for batch in batches]
    shares = [float(seconds.max() / (seconds.sum() / ranks)) for seconds, ranks in drawn]
    return f"over the largest sample, up to {max(shares):.3g} even shares" if max(shares) > 1 else ""


def _fullest_share(batch: Batch) -> float:
    assert batch.tokens is not None
    assert batch.execution.max_tokens is not None
    return float(np.bincount(colocated.plan_slots(batch)[0], weights=batch.tokens).max() / batch.execution.max_tokens)


def _lpt(batch: Batch) -> Slots:
    """The plain greedy rule over all microbatches, those of equal load with equal numbers."""
    seconds, ranks, microbatches = sample_seconds(batch), batch.topology.replicas, batch.topology.microbatches
    bins = lpt(seconds, descending(seconds), batch.num_slots)
    place = np.empty(batch.num_slots, np.int64)
    loads = np.bincount(bins, weights=seconds, minlength=batch.num_slots).astype(np.float64, copy=False)
    place[descending(loads)] = np.arange(batch.num_slots)
    return np.broadcast_to((place % ranks * microbatches + place // ranks)[bins], batch.costs.shape)


def _as_pipeline(batch: Batch, strategy: str = AUTO) -> Slots:
    """Return the plan of a strategy that is not told that ranks have all units. A rank works on what the LLM has there."""
    costs = dict(zip(batch.units, batch.costs, strict=True))
    pipeline = make_batch(batch.sample_ids, costs, batch.topology, SEED, execution=Execution())
    llm = batch.units.index("llm")
    return np.broadcast_to(run_strategy(strategy, pipeline)[1][llm], batch.costs.shape)


if __name__ == "__main__":
    main()
