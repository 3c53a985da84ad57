"""What a candidate takes by the formula: seconds beside a sum by hand, memory beside what the schedules keep."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.held_activations import activation_memory, freed_by
from headrace.plan import GENERATOR, LLM
from headrace.reorder_service.planning.orchestration.candidate import Candidate, UnitGrid
from headrace.reorder_service.planning.orchestration.demand import Demand
from headrace.reorder_service.planning.orchestration.estimate import (
    exchange_s,
    in_flight,
    memory_bytes,
    stages_behind,
    step_s,
)
from headrace.schedule import build, stage_graph
from tests.examples import with_examples
from tests.unit.reorder_service.planning.orchestration.orchestration_world import GIB, cluster_of, unit_of


def demand_of(*units: object, **options: object) -> Demand:
    return Demand(units=units, **{"cluster": cluster_of(4), "global_batch": 8, **options})  # type: ignore[arg-type]


def candidate_of(microbatches: int, placement: str = "disaggregated", **grids: tuple[int, int, int]) -> Candidate:
    return Candidate(
        search="test",
        grids={name: UnitGrid(dp=dp, tp=tp, pp=pp) for name, (dp, tp, pp) in grids.items()},
        microbatches=microbatches,
        placement=placement,  # type: ignore[arg-type]
    )


def test_a_step_is_one_microbatch_through_all_stages_and_the_slowest_for_each_further_one() -> None:
    """4 microbatches of 2 samples of the whole job: 1 on each of 2 LLM replicas, 2 on the one of the encoder."""
    frozen = {"trained_share": 0.0, "widths": (1,)}
    demand = demand_of(unit_of("encoder", 3.0, **frozen), unit_of(LLM, 4.0, **frozen))
    candidate = candidate_of(4, encoder=(1, 1, 2), llm=(2, 1, 2))
    hops = 3 * 2 * 1e-5
    assert step_s(demand, candidate) == pytest.approx(6.0 + 4.0 + hops + 3 * max(6.0 / 2, 4.0 / 2))


def test_encoders_run_side_by_side() -> None:
    units = [unit_of(name, seconds, trained_share=0.0, widths=(1,)) for name, seconds in [("a", 2.0), ("b", 5.0), (LLM, 1.0)]]
    candidate = candidate_of(1, a=(1, 1, 1), b=(1, 1, 1), llm=(1, 1, 1))
    assert step_s(demand_of(*units, global_batch=1), candidate) == pytest.approx(6.0, abs=1e-3)


def test_chunks_divide_the_filling() -> None:
    demand = demand_of(unit_of(LLM, 4.0, trained_share=0.0), schedule="interleaved", chunks=2)
    assert step_s(demand, candidate_of(8, llm=(1, 1, 4))) == pytest.approx(2.0 + 7 * 1.0, abs=1e-3)


def test_gradients_cross_nodes_where_the_unit_does() -> None:
    """1e9 weights in 2 slices and 2 stages: 1e9 bytes of gradients a GPU, of which (dp - 1) / dp pass each way."""
    unit, cluster = unit_of(LLM, 1.0), cluster_of(4, gpus_per_node=4)
    across, within = float(exchange_s(unit, cluster, 4, 2, 2)), float(exchange_s(unit, cluster, 2, 2, 1))
    assert across == pytest.approx(0.75 * 1e9 / cluster.inter_node_bytes_per_s + 2 * cluster.latency_s)
    assert within == pytest.approx(1e9 / cluster.intra_node_bytes_per_s + cluster.latency_s)
    assert float(exchange_s(unit, cluster, 1, 2, 2)) == 0.0
    assert float(exchange_s(replace(unit, trained_share=0.0), cluster, 4, 2, 2)) == 0.0


def test_memory_of_the_fullest_gpu() -> None:
    """1e9 weights, half of them frozen, in 2 stages of 2 replicas; the encoder's first stage has 4 + 1 stages behind it."""
    encoder = unit_of("encoder", 1.0, trained_share=0.5, kept=4 * GIB)
    demand = demand_of(encoder, unit_of(LLM, 1.0))
    memory = memory_bytes(demand, candidate_of(8, encoder=(2, 1, 2), llm=(1, 1, 4)))["encoder"]
    assert memory.weights == 0.25e9 * (4 + 2) + 0.25e9 * 2
    assert memory.gradients == 0.25e9 * 4
    assert memory.optimizer == 0.25e9 * 8 / 2
    assert memory.activations == 6 * 0.5 * 2 * GIB, "6 microbatches of half a sample, of which the stage keeps half"
    assert memory.total == memory.weights + memory.gradients + memory.optimizer + memory.activations


def test_a_unit_without_backward_keeps_nothing() -> None:
    encoder = unit_of("encoder", 1.0, trained_share=0.0, backward_factor=0.0, kept=4 * GIB)
    memory = memory_bytes(demand_of(encoder, unit_of(LLM, 1.0)), candidate_of(8, encoder=(1, 1, 1), llm=(1, 1, 1)))["encoder"]
    assert memory.activations == memory.gradients == memory.optimizer == 0.0
    assert memory.weights == 2e9


@with_examples(60)
@given(
    schedule=st.sampled_from(["1f1b", "gpipe", "eager", "zero-bubble", "interleaved"]),
    pps=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    generator=st.booleans(),
    microbatches=st.integers(1, 7),
)
def test_first_stages_keep_as_many_microbatches_as_the_schedule_has(
    schedule: str, pps: list[int], generator: bool, microbatches: int
) -> None:
    names = ["vision", "audio", LLM, *([GENERATOR] if generator else [])]
    stages = dict(zip(names, pps, strict=False))
    chunks = 2 if schedule == "interleaved" else 1
    demand = demand_of(*(unit_of(name, 1.0) for name in names), schedule=schedule, chunks=chunks)
    candidate = candidate_of(microbatches, **{name: (1, 1, pp) for name, pp in stages.items()})
    behind = {name: stages_behind(candidate, name) for name in names}
    actions = build(schedule, stages, range(microbatches), chunks=chunks)
    for stage, of_stage in zip(stage_graph(stages), actions, strict=True):
        if stage.index > 0:
            continue
        assert stage.num_behind == behind[stage.unit]
        kinds = np.array([action.kind for action in of_stage], np.int64)
        one = np.full(kinds.size, 1.0 / chunks)
        peak = activation_memory(kinds, one, one, freed_by(schedule, has_weights=True)).max()
        most = in_flight(demand, microbatches, stage.num_behind, stage.size, max(behind.values()))
        if schedule in ("zero-bubble", "interleaved"):
            assert peak <= most + 1e-9
        else:
            assert peak == most
