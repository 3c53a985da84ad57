"""How good the plans are: simulated step time, and how level the microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.planning.inputs import FAMILIES, GENERATOR, OMNI, SYNTHCHART, Family, fill_free_bound_s, plan_table, spread_of
from benchmarks.report import Rival, Row, Section, at_least, at_most, more_than
from benchmarks.timing import progress
from headrace.cli.experiment.entrain_experiments import TABLE_4_3
from headrace.plan import CROSS_REPLICA_STRATEGIES
from headrace.reorder_service.planning import STRATEGIES
from headrace.reorder_service.planning.batch import make_batch, slots_of

REPLICAS, MICROBATCHES = 4, 32
HEAVY_MICROBATCHES = 16  # synthchart: with 32 a single sample outweighs a mean microbatch, which no assignment can level
LEVEL_GOAL = 8.0
SPEED_UP_GOAL = 1.20
SLACK = 1.05

# Of Entrain's table 4.3: vision, and Llama 3B. In three of its columns vision and Llama 1B have the same numbers, so that one of
# the two is a copy: `DOUBTFUL`.
ENTRAIN_PUBLISHED = {
    family: dict(zip(("encoder", "llm"), TABLE_4_3[name], strict=True))
    for family, name in (("synthchart", "SynthChartNet"), ("chartqa", "ChartQA"), ("cocoqa", "CocoQA"), ("llava", "LLaVA-150k"))
}
DOUBTFUL = {(name, "encoder") for name in ("chartqa", "cocoqa", "llava")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One strategy's plan of one family."""

    iteration_s: float
    spread: NDArray[np.float64]
    """(U,) standard deviation over the microbatches that hold a sample, in the unit of the costs."""
    filled: int
    """Microbatches that hold a sample, of all replicas."""


def sections() -> Iterator[Section]:
    """All of them; every plan is made once."""
    four = {family.name: _measure(family, MICROBATCHES) for family in FAMILIES}
    heavy = _measure(SYNTHCHART, HEAVY_MICROBATCHES)
    others = {family.name: _measure(family, MICROBATCHES) for family in (OMNI, GENERATOR)}
    for family in (*FAMILIES, OMNI, GENERATOR):
        yield _time_section(family, (four | others)[family.name])
    level = {**four, "synthchart": heavy}
    yield Section(
        title=f"spread over microbatches (standard deviation of their times), disttrain's over joint's: n=512, D={REPLICAS}, "
        f"K={MICROBATCHES}, synthchart K={HEAVY_MICROBATCHES}",
        rows=[row for family in FAMILIES for row in _joint_rows(family, level[family.name])],
    )
    yield Section(
        title=f"the same, disttrain's over entrain's: n=512, D={REPLICAS}, K={MICROBATCHES}",
        rows=[row for family in FAMILIES for row in _entrain_rows(family, four[family.name])],
    )


def _measure(family: Family, microbatches: int) -> dict[str, Measured]:
    table, topology = family.table(), family.topology(REPLICAS, microbatches)
    batch = make_batch(table.sample_ids, table.costs, topology, seed=0)
    measured = {}
    for strategy in STRATEGIES:
        progress(f"quality: {family.name}, K={microbatches}, {strategy}")
        plan = plan_table(strategy, table, topology)
        plan.check()
        slots = slots_of(plan, table.sample_ids)
        occupied = batch.occupied(slots)
        assert plan.predicted is not None
        measured[strategy] = Measured(
            iteration_s=plan.predicted.iteration_s,
            spread=spread_of(batch.loads(slots), occupied),
            filled=int(occupied.sum()),
        )
    return measured


def _time_section(family: Family, measured: dict[str, Measured]) -> Section:
    """Step time over the bound, rival disttrain; the gain over disttrain; `auto` against the best of those that it may take."""
    table, topology = family.table(), family.topology(REPLICAS, MICROBATCHES)
    bound = fill_free_bound_s(table, topology)
    published = family in FAMILIES
    ideal = 1 + (topology.num_stages - 1) / MICROBATCHES
    rows = []
    for strategy, result in measured.items():
        goal = at_most(SLACK * ideal) if published and strategy == "joint" else None
        rival = Rival(value=measured["disttrain"].iteration_s / bound, source="disttrain, ours")
        used = (
            "" if result.filled == REPLICAS * MICROBATCHES else f"{result.filled} of {REPLICAS * MICROBATCHES} microbatches used"
        )
        rows.append(
            Row(
                name=f"{family.name}, {strategy}",
                value=result.iteration_s / bound,
                rival=rival if strategy != "disttrain" else None,
                goal=goal,
                detail=used,
            )
        )
    rows.append(
        Row(
            name=f"{family.name}, speed-up of joint over disttrain",
            value=measured["disttrain"].iteration_s / measured["joint"].iteration_s,
            unit="x",
            goal=at_least(SPEED_UP_GOAL) if family is SYNTHCHART else None,
        )
    )
    candidates = [name for name in measured if name != "auto" and name not in CROSS_REPLICA_STRATEGIES]
    fastest = min(candidates, key=lambda name: measured[name].iteration_s)
    rows.append(
        Row(
            name=f"{family.name}, auto over the fastest other",
            value=measured["auto"].iteration_s / measured[fastest].iteration_s,
            goal=at_most(1.0),
            detail=fastest,
        )
    )
    stages = ", ".join(f"{unit} {count}" for unit, count in family.stages.items())
    title = f"{family.name}: simulated 1F1B step time over the fill-free bound; n={table.sample_ids.size}, D={REPLICAS}, "
    return Section(title=f"{title}K={MICROBATCHES}, stages {stages}", rows=rows)


def _joint_rows(family: Family, measured: dict[str, Measured]) -> Iterator[Row]:
    best = {unit: max(of[unit] for of in ENTRAIN_PUBLISHED.values()) for unit in family.stages}
    for u, unit in enumerate(family.stages):
        theirs, ours = measured["disttrain"].spread[u], measured["joint"].spread[u]
        yield Row(
            name=f"{family.name}, {unit}, joint",
            value=float(theirs / ours),
            unit="x",
            rival=Rival(value=best[unit], source="Entrain at best"),
            goal=at_least(LEVEL_GOAL),
            detail=f"{theirs:.3g} to {ours:.3g}",
        )


def _entrain_rows(family: Family, measured: dict[str, Measured]) -> Iterator[Row]:
    filled = measured["entrain"].filled
    for u, unit in enumerate(family.stages):
        theirs, ours = measured["disttrain"].spread[u], measured["entrain"].spread[u]
        used = "" if filled == REPLICAS * MICROBATCHES else f"; {filled} of {REPLICAS * MICROBATCHES} microbatches used"
        doubt = "; the table has the same numbers for Llama 1B" if (family.name, unit) in DOUBTFUL else ""
        yield Row(
            name=f"{family.name}, {unit}, entrain",
            value=float(theirs / ours),
            unit="x",
            rival=Rival(value=ENTRAIN_PUBLISHED[family.name][unit], source="Entrain, table 4.3"),
            goal=more_than(1.0),
            detail=f"{theirs:.3g} to {ours:.3g}{used}{doubt}",
        )
