"""Units that have replicas of their own: their samples are dealt by cost, within the lane and the microbatch of the plan."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cli.costs.cost_table import read_cost_table
from headrace.plan import Topology
from headrace.reorder_service.planning.batch import Batch, Slots, make_batch, slots_of
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.packing import pack_batch, plan_of_samples
from headrace.reorder_service.planning.search.unit_dealing import deal, with_equal_replicas
from headrace.reorder_service.planning.strategies import CANDIDATES, plan_of
from tests.examples import with_examples

COSTS = Path(__file__).parents[4] / "data" / "costs"
LLM_REPLICAS, MICROBATCHES = 2, 16
STAGES = {"encoder": 3, "llm": 5}


@cache
def batch_of(table: str, encoder_dp: int, num_samples: int = 512) -> Batch:
    costs = read_cost_table(str(COSTS / f"{table}_512.parquet")).take(slice(num_samples))
    topology = Topology(replicas=LLM_REPLICAS, microbatches=MICROBATCHES, stages=STAGES)
    return make_batch(costs.sample_ids, costs.costs, topology, 0, execution=Execution(unit_replicas={"encoder": encoder_dp}))


@cache
def slots_by(strategy: str, table: str, encoder_dp: int, num_samples: int = 512) -> Slots:
    return CANDIDATES[strategy](batch_of(table, encoder_dp, num_samples))


def relative_spread(batch: Batch, slots: Slots) -> tuple[float, float]:
    """Standard deviation over the mean of the microbatches of the encoder's own replicas, and of the LLM's."""
    loads = batch.loads(slots)
    of_units = [loads[:replicas, :, u] for u, replicas in enumerate(batch.unit_replicas)]
    encoder, llm = (float(of_unit.std() / of_unit.mean()) for of_unit in of_units)
    return encoder, llm


@pytest.mark.parametrize("table", ["chartqa", "synthchart"])
@pytest.mark.parametrize("encoder_dp", [3, 4])
def test_the_microbatches_of_an_encoders_own_replicas_are_as_level_as_those_of_the_llm(table: str, encoder_dp: int) -> None:
    encoder, llm = relative_spread(batch_of(table, encoder_dp), slots_by("joint", table, encoder_dp))
    assert encoder <= 0.02
    assert llm <= 0.02


@pytest.mark.parametrize("encoder_dp", [3, 4])
def test_few_samples_in_a_microbatch_change_places_until_they_can_be_dealt_evenly(encoder_dp: int) -> None:
    batch = batch_of("chartqa", encoder_dp, 256)  # 4 or 5 samples for each of the encoder's microbatches
    encoder, llm = relative_spread(batch, slots_by("joint", "chartqa", encoder_dp, 256))
    assert encoder <= 0.005
    assert llm <= 0.005


@pytest.mark.parametrize("encoder_dp", [3, 4])
def test_taper_is_faster_than_disttrain_with_replicas_of_its_own_too(encoder_dp: int) -> None:
    batch = batch_of("synthchart", encoder_dp)
    seconds = {}
    for strategy in ("taper", "disttrain"):
        predicted = plan_of(strategy, batch).predicted
        assert predicted is not None
        seconds[strategy] = predicted.iteration_s
    assert seconds["disttrain"] / seconds["taper"] >= 1.15


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    units = ["vision", "audio"][: draw(st.integers(1, 2))] + ["llm"] + ["generator"] * draw(st.booleans())
    own = {unit: draw(st.integers(1, 6)) for unit in units if unit != "llm"}
    count = draw(st.integers(1, 40))
    costs = {unit: rng.lognormal(0, 1, count) * (rng.random(count) < 0.7) for unit in units}
    topology = Topology(replicas=draw(st.integers(1, 6)), microbatches=draw(st.integers(1, 4)), stages=dict.fromkeys(units, 1))
    return make_batch(rng.permutation(count), costs, topology, draw(st.integers(0, 9)), execution=Execution(unit_replicas=own))


@with_examples(60)
@given(batches(), st.sampled_from(sorted(CANDIDATES)))
def test_every_strategy_deals_each_sample_once_in_its_lane_and_its_microbatch(batch: Batch, strategy: str) -> None:
    plan = plan_of(strategy, batch)
    plan.check()
    assert {unit: len(replicas) for unit, replicas in plan.unit_replicas.items()} == batch.execution.unit_replicas
    slots = slots_of(plan, batch.sample_ids)
    assert strategy == "orchmllm" or not batch.crosses_replicas(slots)
    assert plan == plan_of(strategy, batch), "a plan depends on nothing but the batch"


@with_examples(60)
@given(batches())
def test_samples_that_change_places_leave_as_many_in_every_microbatch_of_the_llm(batch: Batch) -> None:
    even = with_equal_replicas(batch)
    planned = CANDIDATES["joint"](even)
    llm, num_slots = batch.units.index("llm"), even.num_slots
    dealt = deal(batch, planned, exchanging=True)
    expected = np.bincount(planned[llm], minlength=num_slots)
    np.testing.assert_array_equal(np.bincount(dealt[llm], minlength=num_slots), expected)
    np.testing.assert_array_equal(deal(batch, planned)[llm], planned[llm])


@with_examples(30)
@given(batches())
def test_as_if_numbers_were_equal_a_units_replicas_share_the_same_work(batch: Batch) -> None:
    even = with_equal_replicas(batch)
    busy = even.costs.sum(axis=1) / even.topology.replicas
    np.testing.assert_allclose(busy, batch.costs.sum(axis=1) / np.array(batch.unit_replicas))


def test_a_lane_is_a_fair_share_of_both_units() -> None:
    batch = batch_of("chartqa", 4)
    slots = slots_by("joint", "chartqa", 4)
    encoder, llm = slots // MICROBATCHES
    assert (encoder // 2 == llm).all(), "encoder replicas 0 and 1 are those of LLM replica 0"
    swapped = slots.copy()
    swapped[0] = (3 - encoder) * MICROBATCHES + slots[0] % MICROBATCHES
    assert batch.crosses_replicas(swapped)


def test_packs_are_dealt_whole() -> None:
    batch = batch_of("chartqa", 3, 64)
    of_packs, packs = pack_batch(batch, np.full(64, 300), 1000, padded=True)
    plan = plan_of_samples(plan_of("joint", of_packs), batch, packs)
    plan.check()
    encoder = slots_of(plan, batch.sample_ids)[0]
    assert all(len(set(encoder[packs == pack])) == 1 for pack in range(packs.max() + 1))


def test_unequal_speeds_of_the_llms_replicas_keep_an_encoders_own_replicas_level() -> None:
    batch = batch_of("chartqa", 3)
    plan = plan_of("joint", batch, speeds=np.array([1.0, 2.0]))
    plan.check()
    loads = batch.loads(slots_of(plan, batch.sample_ids))
    assert loads[:2, :, 1].sum(axis=1)[1] == pytest.approx(2 * loads[0, :, 1].sum(), rel=0.05)
    totals = loads[:3, :, 0].sum(axis=1)
    assert totals.max() / totals.mean() < 1.01


@pytest.mark.parametrize("own", [{"llm": 3}, {"audio": 3}])
def test_only_units_behind_or_in_front_of_the_llm_have_replicas_of_their_own(own: dict[str, int]) -> None:
    costs = {unit: np.ones(4) for unit in STAGES}
    with pytest.raises(ValueError, match="unit_replicas are for units of"):
        make_batch(
            np.arange(4), costs, Topology(replicas=2, microbatches=1, stages=STAGES), 0, execution=Execution(unit_replicas=own)
        )


def test_so_many_as_the_llm_are_no_replicas_of_its_own() -> None:
    costs = {unit: np.ones(4) for unit in STAGES}
    topology = Topology(replicas=2, microbatches=1, stages=STAGES)
    batch = make_batch(np.arange(4), costs, topology, 0, execution=Execution(unit_replicas={"encoder": 2}))
    assert not batch.execution.unit_replicas
    assert not plan_of("joint", batch).unit_replicas
    assert math.prod(batch.unit_replicas) == 4


@pytest.mark.parametrize("wrong", [{"unit_replicas": {"encoder": 0}}, {"unit_replicas": {"encoder": 2}, "colocated": "step"}])
def test_replicas_are_counted_from_one_and_are_for_pipelines(wrong: dict) -> None:
    with pytest.raises(ValueError, match="unit_replicas must be at least 1, and are for pipelines only"):
        Execution(**wrong)
