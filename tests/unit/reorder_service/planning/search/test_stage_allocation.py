"""Stages go to the units that need them, forward and backward together."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.backward_factors import backward_factors
from headrace.cli.costs.cost_table import read_cost_table
from headrace.plan import Topology
from headrace.reorder_service.planning.batch import Batch, Slots, make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.search.stage_allocation import Stages, fastest_stages, level_stages
from headrace.reorder_service.planning.strategies import plan_of, run_strategy

COSTS = Path(__file__).parents[4] / "data" / "costs"


def splits(units: tuple[str, ...], num_stages: int) -> list[Stages]:
    """Every way to divide the stages."""
    counts = itertools.product(range(1, num_stages + 1), repeat=len(units))
    return [dict(zip(units, split, strict=True)) for split in counts if sum(split) == num_stages]


def batch_of(family: str, stages: Stages, frozen: tuple[str, ...] = (), **execution: float) -> Batch:
    """4 replicas with 32 microbatches of a table's samples."""
    table = read_cost_table(str(COSTS / f"{family}.parquet"))
    how = Execution(backward_factors=backward_factors(stages, frozen=frozen), **execution)  # type: ignore[arg-type]
    topology = Topology(replicas=4, microbatches=32, stages=stages)
    return make_batch(table.sample_ids, table.costs, topology, 0, execution=how)


def step_s(family: str, stages: Stages, frozen: tuple[str, ...]) -> float:
    predicted = plan_of("auto", batch_of(family, stages, frozen)).predicted
    assert predicted is not None
    return predicted.iteration_s


def auto(batch: Batch) -> Slots:
    return run_strategy("auto", batch)[1]


@given(
    totals=st.lists(st.floats(0, 100), min_size=1, max_size=4),
    factors=st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), min_size=4, max_size=4),
    extra=st.integers(0, 4),
)
def test_no_other_split_has_a_lighter_heaviest_stage(totals: list[float], factors: list[float], extra: int) -> None:
    forward = {f"u{i}": total for i, total in enumerate(totals)}
    backward = dict(zip(forward, factors, strict=False))
    dealt = level_stages(forward, len(totals) + extra, backward_factors=backward)
    assert sum(dealt.values()) == len(totals) + extra

    def heaviest(split: Stages) -> float:
        return max(forward[unit] * (1 + backward[unit]) / count for unit, count in split.items())

    assert heaviest(dealt) == min(map(heaviest, splits(tuple(forward), len(totals) + extra)))


def test_a_unit_gets_no_more_stages_than_its_layers_can_fill() -> None:
    assert level_stages({"encoder": 9.0, "llm": 1.0}, 6, most={"encoder": 2}) == {"encoder": 2, "llm": 4}
    with pytest.raises(ValueError, match="6 is more than the layers of encoder, llm can be cut into"):
        level_stages({"encoder": 9.0, "llm": 1.0}, 6, most={"encoder": 2, "llm": 3})
    with pytest.raises(ValueError, match=r"at least 1 per unit \(encoder, llm\), got 1"):
        level_stages({"encoder": 9.0, "llm": 1.0}, 1)


def test_a_frozen_encoder_without_a_backward_needs_fewer_stages() -> None:
    factors = backward_factors(("encoder", "llm"), frozen=["encoder"])
    assert level_stages({"encoder": 10.0, "llm": 10.0}, 8) == {"encoder": 4, "llm": 4}
    assert level_stages({"encoder": 10.0, "llm": 10.0}, 8, backward_factors=factors) == {"encoder": 2, "llm": 6}


@pytest.mark.parametrize(("family", "frozen"), [("llava_512", ("encoder",)), ("omni_2048", ("vision", "audio"))])
def test_the_dealt_stages_are_the_fastest_of_all_splits(family: str, frozen: tuple[str, ...]) -> None:
    """omni: where samples differ, the lightest heaviest stage is not the fastest split."""
    table = read_cost_table(str(COSTS / f"{family}.parquet"))
    level = level_stages(table.totals(), 8, backward_factors=backward_factors(table.units, frozen=frozen))
    dealt = fastest_stages(batch_of(family, level, frozen), auto)
    assert step_s(family, dealt, frozen) == min(step_s(family, split, frozen) for split in splits(table.units, 8))
    assert (dealt == level) == (family == "llava_512")


def test_from_any_split_the_same_one_is_found() -> None:
    for split in splits(("encoder", "llm"), 8):
        assert fastest_stages(batch_of("llava_512", split, ("encoder",)), auto) == {"encoder": 2, "llm": 6}


def test_layers_bound_the_moves_too() -> None:
    batch = batch_of("llava_512", {"encoder": 4, "llm": 4}, ("encoder",))
    assert fastest_stages(batch, auto, {"llm": 5}) == {"encoder": 3, "llm": 5}


def test_a_split_within_the_memory_limit_comes_before_a_faster_one() -> None:
    even = {"encoder": 4, "llm": 4}
    assert fastest_stages(batch_of("llava_512", even), auto) == even
    assert fastest_stages(batch_of("llava_512", even, memory_limit=1.3), auto) == {"encoder": 5, "llm": 3}
    assert fastest_stages(batch_of("llava_512", even, memory_limit=1.1), auto) == {"encoder": 6, "llm": 2}


def test_a_split_that_cannot_run_is_not_taken() -> None:
    def not_with_six(batch: Batch) -> Slots:
        if batch.topology.stages["llm"] == 6:
            raise ValueError("the plan defers more than the schedule can wait for")
        return auto(batch)

    assert fastest_stages(batch_of("llava_512", {"encoder": 4, "llm": 4}, ("encoder",)), not_with_six) == {"encoder": 3, "llm": 5}
