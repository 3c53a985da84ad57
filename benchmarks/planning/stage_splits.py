"""Whether the stages that are dealt to units are the best of all splits: each split is planned and simulated."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator

from benchmarks.planning.inputs import FAMILIES, GENERATOR, OMNI, Family
from benchmarks.report import Rival, Row, Section, at_most
from benchmarks.timing import progress
from headrace.backward_factors import backward_factors
from headrace.plan import LLM, Topology
from headrace.reorder_service.planning.batch import Batch, Slots, make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.search.stage_allocation import Stages, fastest_stages, level_stages
from headrace.reorder_service.planning.strategies import AUTO, plan_of, run_strategy

NUM_STAGES, REPLICAS, MICROBATCHES = 8, 4, 32


def sections() -> Iterator[Section]:
    """Every cost table, with each set of frozen units. A projector is never frozen."""
    yield Section(
        title=f"step of the dealt stages over that of the best split (exhaustive), auto: D={REPLICAS}, K={MICROBATCHES}, "
        f"{NUM_STAGES} stages",
        rows=[_row(family, name, frozen) for family in (*FAMILIES, OMNI, GENERATOR) for name, frozen in _frozen_sets(family)],
    )


def _frozen_sets(family: Family) -> list[tuple[str, tuple[str, ...]]]:
    units = tuple(family.stages)
    encoders = family.topology(1, 1).encoders
    return [("nothing frozen", ()), ("frozen encoders", encoders), ("frozen llm", (LLM,)), ("only projectors learn", units)]


def _row(family: Family, name: str, frozen: Collection[str]) -> Row:
    progress(f"stage splits: {family.name}, {name}")
    units = tuple(family.stages)
    level = level_stages(family.table().totals(), NUM_STAGES, backward_factors=backward_factors(units, frozen=frozen))
    unaware = level_stages(family.table().totals(), NUM_STAGES)
    dealt = fastest_stages(_batch(family, level, frozen), _planned)
    seconds = {tuple(split.values()): _step_s(family, split, frozen) for split in _splits(units)}
    best = min(seconds, key=lambda split: seconds[split])
    return Row(
        name=f"{family.name}, {name}",
        value=seconds[tuple(dealt.values())] / seconds[best],
        rival=Rival(value=seconds[tuple(unaware.values())] / seconds[best], source="dealt by forward times"),
        goal=at_most(1.0),
        detail=f"{'+'.join(map(str, dealt.values()))} of {len(seconds)} splits",
    )


def _splits(units: tuple[str, ...]) -> Iterator[Stages]:
    for counts in itertools.product(range(1, NUM_STAGES + 1), repeat=len(units)):
        if sum(counts) == NUM_STAGES:
            yield dict(zip(units, counts, strict=True))


def _batch(family: Family, stages: Stages, frozen: Collection[str]) -> Batch:
    table = family.table()
    topology = Topology(replicas=REPLICAS, microbatches=MICROBATCHES, stages=stages)
    execution = Execution(backward_factors=backward_factors(stages, frozen=frozen))
    return make_batch(table.sample_ids, table.costs, topology, seed=0, execution=execution)


def _planned(batch: Batch) -> Slots:
    return run_strategy(AUTO, batch)[1]


def _step_s(family: Family, stages: Stages, frozen: Collection[str]) -> float:
    predicted = plan_of(AUTO, _batch(family, stages, frozen)).predicted
    assert predicted is not None
    return predicted.iteration_s
