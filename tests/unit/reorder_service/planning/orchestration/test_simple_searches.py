"""Megatron's layout and the ratio-based one: what they give each unit, that it fits, and what is said where nothing does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan import LLM
from headrace.reorder_service.planning.orchestration.candidate import Candidate
from headrace.reorder_service.planning.orchestration.demand import Demand
from headrace.reorder_service.planning.orchestration.estimate import fits, step_s
from headrace.reorder_service.planning.orchestration.searches import SEARCHES, megatron, ratio
from tests.examples import with_examples
from tests.unit.reorder_service.planning.orchestration.orchestration_world import GIB, cluster_of, demands, unit_of

pytestmark = pytest.mark.timeout(600)  # whichever test comes first may have to compile the kernels


def outcome(name: str, demand: Demand) -> list[Candidate] | str:
    """What a search returns, or the sentence with which it refuses."""
    try:
        return SEARCHES[name](demand)
    except ValueError as err:
        return str(err)


@pytest.mark.parametrize("name", sorted(SEARCHES))
@with_examples(40)
@given(demand=demands())
def test_what_a_search_returns_can_run(name: str, demand: Demand) -> None:
    found = outcome(name, demand)
    assert found
    if isinstance(found, str):
        return
    times = [step_s(demand, candidate) for candidate in found]
    if name in ("megatron", "ratio"):
        assert times == sorted(times)
    for candidate in found:
        assert tuple(candidate.grids) == demand.unit_names
        assert candidate.gpus <= demand.cluster.num_gpus
        assert fits(demand, candidate)
        replicas = candidate.grids[LLM].dp
        assert demand.global_batch % (replicas * candidate.microbatches) == 0
        samples = demand.global_batch // candidate.microbatches
        for unit in demand.units:
            grid = candidate.grids[unit.name]
            assert grid.pp <= unit.layers
            assert grid.dp <= samples
            assert grid.tp in unit.forward_s
            assert demand.cluster.gpus_per_node % grid.tp == 0


@pytest.mark.parametrize("name", sorted(SEARCHES))
@with_examples(20)
@given(demand=demands())
def test_a_search_is_deterministic(name: str, demand: Demand) -> None:
    assert outcome(name, demand) == outcome(name, demand)


def test_megatron_puts_one_stage_of_encoder_in_front_of_each_pipeline() -> None:
    demand = Demand(units=(unit_of("encoder", 1.0), unit_of(LLM, 4.0)), cluster=cluster_of(8), global_batch=16)
    best = megatron.search(demand)[0]
    assert best.grids["encoder"].pp == 1
    assert {grid.tp for grid in best.grids.values()} == {4}
    assert len({grid.dp for grid in best.grids.values()}) == 1


def test_megatron_replicates_the_encoder_where_a_microbatch_has_samples_for_it() -> None:
    demand = Demand(units=(unit_of("encoder", 1.0), unit_of(LLM, 4.0)), cluster=cluster_of(2), global_batch=16)
    best = megatron.search(demand, microbatch=4)[0]
    assert best.grids["encoder"].tp == 1
    assert best.grids["encoder"].dp == 4 * best.grids[LLM].dp


def test_ratio_gives_gpus_in_proportion_to_work() -> None:
    demand = Demand(
        units=(unit_of("encoder", 1.0, parameters=1e8), unit_of(LLM, 3.0, parameters=1e8)), cluster=cluster_of(4), global_batch=16
    )
    best = ratio.search(demand)[0]
    assert {name: grid.gpus for name, grid in best.grids.items()} == {"encoder": 4, LLM: 12}


def test_megatron_with_as_many_stages_as_asked() -> None:
    demand = Demand(units=(unit_of("encoder", 1.0), unit_of(LLM, 4.0)), cluster=cluster_of(8), global_batch=16)
    assert {candidate.grids[LLM].pp for candidate in megatron.search(demand, llm_stages=3)} == {3}


def test_ratio_gives_a_small_unit_what_its_memory_needs() -> None:
    """An encoder with a thousandth of the work, which keeps more than a GPU holds."""
    encoder = unit_of("encoder", 0.004, parameters=1e8, kept=20 * GIB)
    demand = Demand(units=(encoder, unit_of(LLM, 4.0, parameters=1e8)), cluster=cluster_of(4), global_batch=16)
    best = ratio.search(demand)[0]
    assert fits(demand, best)
    assert best.grids["encoder"].gpus > 1


@pytest.mark.parametrize("name", sorted(SEARCHES))
@pytest.mark.parametrize(
    ("llm", "remedy"),
    [
        (unit_of(LLM, 1.0, parameters=1e11, trained_share=0.0), "weights and gradients, so take more GPUs"),
        (unit_of(LLM, 1.0, parameters=1e6, kept=1e12), "activations, so run llm with checkpointing"),
    ],
)
def test_a_model_that_fits_nowhere_is_told_by_how_much(name: str, llm: object, remedy: str) -> None:
    demand = Demand(units=(unit_of("encoder", 1.0, parameters=1e6), llm), cluster=cluster_of(1, 4), global_batch=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"does not fit 4 GPUs of 48 GiB: llm as .* GiB too many") as refused:
        SEARCHES[name](demand)
    assert remedy in str(refused.value)


@pytest.mark.parametrize("name", sorted(SEARCHES))
def test_too_few_gpus_for_the_units(name: str) -> None:
    demand = Demand(units=(unit_of("encoder", 1.0), unit_of(LLM, 1.0)), cluster=cluster_of(1, 1), global_batch=4)
    with pytest.raises(ValueError, match="too few"):
        SEARCHES[name](demand)


@given(batch=st.integers(1, 30), microbatch=st.integers(2, 7))
def test_a_global_batch_that_cannot_be_cut(batch: int, microbatch: int) -> None:
    demand = Demand(units=(unit_of(LLM, 1.0, parameters=1e8),), cluster=cluster_of(1), global_batch=batch)
    if batch % microbatch:
        with pytest.raises(ValueError, match="take a multiple"):
            megatron.search(demand, microbatch=microbatch)
    else:
        assert megatron.search(demand, microbatch=microbatch)
