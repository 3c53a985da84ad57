"""The judge's figures are those of a step that is worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from headrace.reorder_service.planning.orchestration.candidate import Candidate, UnitGrid
from headrace.reorder_service.planning.orchestration.demand import Demand
from headrace.reorder_service.planning.orchestration.estimate import USABLE_SHARE
from headrace.reorder_service.planning.orchestration.exchange import gathering_s
from headrace.reorder_service.planning.orchestration.judge import draw_batches, judge, stage_loads
from headrace.reorder_service.planning.orchestration.judgement import IDLE, MODEL, SLICES, WAITING, in_words, why_it_loses
from headrace.reorder_service.planning.orchestration.links import collective_s, exposed_s
from tests.unit.reorder_service.planning.orchestration.orchestration_world import GIB, cluster_of, unit_of


def two_units(seconds: float = 3.0, **llm: object) -> Demand:
    """An encoder of 1 s and an LLM of 3 s a sample, whose weights and rows are next to nothing."""
    small = {"parameters": 1.0, "layers": 6, "widths": (1, 2)}
    return Demand(
        units=(unit_of("vision", 1.0, **small), unit_of("llm", seconds, **{**small, **llm})),
        cluster=cluster_of(2),
        global_batch=8,
    )


def candidate(
    vision: tuple[int, int, int], llm: tuple[int, int, int], microbatches: int, placement: str = "disaggregated"
) -> Candidate:
    sizes = {"vision": vision, "llm": llm}
    return Candidate(
        search="test",
        grids={unit: UnitGrid(dp=dp, tp=tp, pp=pp) for unit, (dp, tp, pp) in sizes.items()},
        microbatches=microbatches,
        placement=placement,
    )


def test_a_pipeline_of_equal_stages_takes_as_long_as_1f1b_says() -> None:
    """Four stages of 1 s a microbatch: eight microbatches pass in 8 + 3 s, but for the transfers."""
    demand = two_units()
    judged = judge(demand, candidate((1, 1, 1), (1, 1, 3), 8), draw_batches(demand, 2, 0), "random")
    assert judged.steps_s == pytest.approx([11.0, 11.0], rel=1e-3)
    assert sum(judged.parts.values()) == pytest.approx(8 * judged.step_s)
    assert judged.parts[MODEL] == pytest.approx(8 * 4)
    assert judged.share(IDLE) == pytest.approx(0.5)
    assert judged.parts[WAITING] == pytest.approx(4 * 11 - 8 * 4, rel=1e-3)


def test_stages_have_whole_layers() -> None:
    three, four, five = (unit_of("llm", 1.0, layers=layers) for layers in (3, 4, 5))
    assert stage_loads(three, 2) == [[pytest.approx(4 / 3)] * 3, [pytest.approx(2 / 3)] * 3]
    assert stage_loads(four, 2) == [[1.0] * 3] * 2
    assert [one[0] for one in stage_loads(five, 2, 2)] == [pytest.approx(6 / 5), pytest.approx(4 / 5)]
    demand = two_units(seconds=6.0)
    judged = judge(demand, candidate((1, 1, 1), (1, 1, 4), 8), draw_batches(demand, 1, 0), "random")
    assert judged.step_s > 2.0 * 8 + 2.0, "six layers on four stages take 2 s a microbatch, as on three, and not 1.5"


def test_slices_that_lose_time_are_told_apart_from_waiting() -> None:
    demand = two_units()
    sliced = judge(demand, candidate((1, 2, 1), (1, 1, 3), 8), draw_batches(demand, 1, 0), "random")
    assert sliced.parts[SLICES] == pytest.approx(8 * 0.1), "a doubling loses a tenth"


def test_memory_is_that_of_the_fullest_stage() -> None:
    """The LLM's stage keeps its one microbatch of 2 GiB, the encoder's in front of it two of nothing."""
    demand = two_units(kept=2 * GIB, parameters=1e9)
    judged = judge(demand, candidate((1, 1, 1), (1, 1, 1), 8), draw_batches(demand, 1, 0), "random")
    [vision, llm] = judged.ranks
    assert (vision.activations, llm.activations) == (0.0, pytest.approx(2 * GIB))
    assert (llm.weights, llm.gradients, llm.optimizer) == (6e9, 4e9, 8e9)
    assert judged.fullest is llm
    assert judged.fits
    assert judged.memory_bytes == 48 * GIB * USABLE_SHARE


def test_what_does_not_fit_says_by_how_much() -> None:
    demand = two_units(kept=60 * GIB)
    batches = draw_batches(demand, 1, 0)
    judged = judge(demand, candidate((1, 1, 1), (1, 1, 1), 8), batches, "random")
    assert judged.over_bytes == pytest.approx((60 - 48 * USABLE_SHARE) * GIB, rel=1e-6)
    fitting = judge(demand, candidate((1, 1, 1), (1, 2, 1), 8), batches, "random")
    assert fitting.fits
    assert fitting.key < judged.key
    words = why_it_loses(judged, fitting)
    assert words.startswith("takes 15.8 GiB more than a GPU has")
    assert "activations" in words


def test_idle_gpus_are_why_a_small_placement_loses() -> None:
    demand = two_units()
    batches = draw_batches(demand, 1, 0)
    small = judge(demand, candidate((1, 1, 1), (1, 1, 1), 8), batches, "random")
    large = judge(demand, candidate((2, 1, 1), (2, 1, 3), 4), batches, "random")
    assert "75% of the cluster's GPUs have no unit" in why_it_loses(small, large)


def test_where_all_parts_have_the_same_shares_none_is_said_to_be_why() -> None:
    demand = two_units()
    judged = judge(demand, candidate((1, 1, 1), (1, 1, 1), 8), draw_batches(demand, 1, 0), "random")
    parts = {name: 1.02 * amount for name, amount in judged.parts.items()}
    longer = replace(judged, steps_s=1.02 * judged.steps_s, parts=parts)
    assert why_it_loses(longer, judged) == "takes 2.0% longer, with no part that stands out"


def test_colocated_ranks_take_the_sum_of_their_units() -> None:
    demand = two_units()
    colocated = candidate((8, 1, 1), (8, 1, 1), 1, "colocated")
    judged = judge(demand, colocated, draw_batches(demand, 3, 0))
    assert judged.steps_s == pytest.approx([4.0] * 3, rel=1e-3)
    assert judged.candidate.gpus == 8
    assert in_words(colocated) == "all units on 8 x 1 ranks, 1 microbatches"


def test_colocated_ranks_wait_for_weights_that_take_longer_than_computing() -> None:
    demand = two_units(parameters=1e11)
    colocated = candidate((8, 1, 1), (8, 1, 1), 1, "colocated")
    forward_s, backward_s = gathering_s(demand, colocated)
    judged = judge(demand, colocated, draw_batches(demand, 1, 0))
    assert forward_s > 4 / 3
    in_twelve_layers = 11 / 12
    expected = forward_s + 4 / 3 * (1 - in_twelve_layers) + float(8 / 3 + exposed_s(backward_s, 8 / 3, 12))
    assert judged.step_s == pytest.approx(expected)
    assert judged.ranks[0].optimizer == pytest.approx(1e11, rel=1e-6), "8 bytes of each weight, over 8 ranks"


def test_computing_hides_what_is_sent_meanwhile_but_for_one_part() -> None:
    assert float(exposed_s(8.0, 4.0, 4)) == 5.0, "the first of four parts is gathered before computing begins"
    assert float(exposed_s(8.0, 40.0, 4)) == 2.0
    assert float(exposed_s(8.0, 40.0, 1)) == 8.0, "nothing is hidden of one part"
    assert exposed_s(0.0, np.array([1.0, 0.0]), 3).tolist() == [0.0, 0.0]


def test_pipelines_hide_their_exchange_as_sharded_ranks_do() -> None:
    """One stage and one microbatch of an LLM of six layers on eight ranks: 1 s forward, 2 s backward, and much to exchange."""
    demand = Demand(units=(unit_of("llm", 3.0, layers=6, parameters=1e10, widths=(1,)),), cluster=cluster_of(2), global_batch=8)
    pipelines = Candidate(search="test", grids={"llm": UnitGrid(dp=8, tp=1, pp=1)}, microbatches=1)
    one_s = float(collective_s(4e10, 8, 4, demand.cluster))
    judged = judge(demand, pipelines, draw_batches(demand, 1, 0), "random")
    assert judged.step_s == pytest.approx(3.0 + float(exposed_s(one_s, 1.0, 6) + exposed_s(one_s, 2.0, 6)))


@pytest.mark.parametrize("placement", ["encoders-first", "nested"])
def test_encoders_on_the_llms_gpus_take_their_time_and_memory_there(placement: str) -> None:
    """Three stages of an LLM of 1 s each a microbatch, on whose GPUs three replicas of the encoder take 8 s in all."""
    demand = two_units(kept=2 * GIB, parameters=1e9)
    shared = candidate((3, 1, 1), (1, 1, 3), 8, placement)
    judged = judge(demand, shared, draw_batches(demand, 1, 0))
    assert judged.candidate.gpus == 3
    assert judged.step_s > 8 * 4 / 3, "what all of it takes, spread evenly"
    assert len(judged.ranks) == 3, "one for each stage of the LLM"
    assert judged.ranks[0].weights == pytest.approx(6 * (1e9 / 3 + 1)), "a third of the LLM, and the encoder's one weight"
    assert judged.ranks[0].activations == pytest.approx(3 * 2 * GIB / 3), "1F1B holds three microbatches on the first stage"
    assert sum(judged.parts.values()) == pytest.approx(8 * judged.step_s)
    where = {"nested": "nested in", "encoders-first": "in front of"}[placement]
    assert in_words(shared) == f"vision 3 x 1 x 1 {where} llm 1 x 1 x 3, 8 microbatches"


def test_nested_encoders_fill_bubbles_that_others_leave() -> None:
    """Four microbatches of two samples: 1F1B takes (4 + 2) x 2 s, and a rank that encodes three of the eight samples 3 s more."""
    demand, batches = two_units(), draw_batches(two_units(), 1, 0)
    first, nested = (judge(demand, candidate((3, 1, 1), (1, 1, 3), 4, one), batches) for one in ("encoders-first", "nested"))
    assert first.step_s == pytest.approx(15.0, rel=1e-3)
    assert 12 < nested.step_s < 13.5
    assert first.parts[WAITING] > nested.parts[WAITING]


def test_an_exchange_goes_over_the_slowest_links_between_its_gpus() -> None:
    cluster = cluster_of(2)
    assert collective_s(1e9, 1, 4, cluster) == 0.0
    within = collective_s(1e9, 4, 4, cluster)
    assert within == pytest.approx(0.75 * 1e9 / cluster.intra_node_bytes_per_s + 2 * cluster.latency_s)
    alone, together = collective_s(1e9, 2, 1, cluster), collective_s(1e9, 8, 4, cluster)
    assert alone == pytest.approx(0.5 * 1e9 / cluster.inter_node_bytes_per_s + cluster.latency_s)
    assert together < alone, "a group of four GPUs of a node has the links of all four"


def test_every_sample_is_in_one_batch_of_an_epoch() -> None:
    demand = Demand(units=(unit_of("llm", 1.0, samples=[1.0] * 16),), cluster=cluster_of(1), global_batch=8)
    batches = draw_batches(demand, 3, 0)
    assert batches.shape == (3, 8)
    assert sorted(batches[:2].ravel()) == list(range(16))
    assert (draw_batches(demand, 3, 0) == batches).all()
    assert (draw_batches(demand, 3, 1) != batches).any()
    assert np.bincount(draw_batches(two_units(), 2, 0).ravel()).tolist() == [16], "few samples repeat"
