"""What microbatches and steps take besides their samples, from a coefficients file to forecasts."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from headrace.model_shape import MODEL_SHAPES
from headrace.plan import Topology
from headrace.reorder_service.jobs.job_execution import execution_of
from headrace.reorder_service.planning.batch import make_batch
from headrace.reorder_service.planning.cost_model.coefficients import LayerCost
from headrace.reorder_service.planning.cost_model.coefficients_document import parse_coefficients
from headrace.reorder_service.planning.cost_model.correction import Correction, UnitCorrection
from headrace.reorder_service.planning.cost_model.cost import estimate
from headrace.reorder_service.planning.cost_model.measured_costs import MeasuredCosts, PartCosts
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.orchestration.candidate import Candidate, UnitGrid
from headrace.reorder_service.planning.orchestration.cluster import Cluster
from headrace.reorder_service.planning.orchestration.demand import Demand
from headrace.reorder_service.planning.orchestration.estimate import step_s, update_s
from headrace.reorder_service.planning.orchestration.judge import draw_batches, judge
from headrace.reorder_service.planning.orchestration.judgement import EXCHANGE, UPDATE
from headrace.reorder_service.planning.orchestration.model_demand import Training, demand_of
from headrace.reorder_service.planning.orchestration.searches import SEARCHES
from headrace.reorder_service.planning.simulation.prediction import predict_step
from headrace.sample import Probe
from headrace.spec import AudioSpec, ImageSpec, parse_spec

BACKWARD = {"input_gradients": 1.5, "weight_gradients": 0.5, "rerun": 1.0}
DOCUMENT: dict[str, Any] = {
    "units": {
        "vision": {"layers": 2, "linear_s": 1e-3, "backward": BACKWARD, "microbatch": {"forward_s": 0.1, "backward_s": 0.3}},
        "llm": {
            "layers": 4, "linear_s": 1e-3, "backward": BACKWARD, "microbatch": {"forward_s": 0.2, "backward_s": 0.6},
            "step": {"gradients_s": 0.5, "update_s": 4.0}, "ends": {"targets": {"linear_s": 0.05}},
        },
    },
}  # fmt: skip
PROBES = [Probe(name=f"{number}", num_tokens=100, num_targets=10, image_patches=(100,)) for number in range(8)]
MACHINE = Cluster(
    name="machine", nodes=1, gpus_per_node=4, memory_gib=8.0, flops_per_s=1e12, intra_node_bytes_per_s=1e12,
    inter_node_bytes_per_s=1e12, latency_s=1e-9,
)  # fmt: skip
VISION_S, LLM_S = 0.2, 0.4 + 0.5
"""Forward of a sample: 100 patches in 2 layers; 100 tokens in 4, and 10 of them that carry loss."""


def demand(*, fixed: bool = True, **training: Any) -> Demand:
    units = {
        name: entry if fixed else {field: value for field, value in entry.items() if field not in ("microbatch", "step")}
        for name, entry in DOCUMENT["units"].items()
    }
    how = Training(global_batch=8, **training)
    measured = {1: parse_coefficients({"units": units})}
    return demand_of(PROBES, MODEL_SHAPES["tiny"], MACHINE, how, image=ImageSpec(), audio=AudioSpec(), measured=measured)


def candidate(microbatches: int, *, dp: int = 1, placement: str = "disaggregated") -> Candidate:
    grid = UnitGrid(dp=dp, tp=1, pp=1)
    return Candidate(search="t", grids={"vision": grid, "llm": grid}, microbatches=microbatches, placement=placement)


def seconds(asked: Demand, chosen: Candidate) -> float:
    return judge(asked, chosen, draw_batches(asked, 1, 0), "random").step_s


def test_targets_alone_take_what_the_head_takes() -> None:
    probes = [Probe(name="few", num_tokens=100, num_targets=10), Probe(name="none", num_tokens=100, num_targets=0)]
    measured = parse_coefficients(DOCUMENT).coefficients
    shape = MODEL_SHAPES["tiny"]
    found = estimate(probes, shape, image=ImageSpec(), audio=AudioSpec(), units=("vision", "llm"), measured=measured)
    np.testing.assert_allclose(found.seconds["llm"], [LLM_S, 0.4])


@pytest.mark.parametrize("count", [1, 2, 8])
def test_every_microbatch_takes_as_much_more_on_the_stage_that_is_always_busy(count: int) -> None:
    """The LLM works all the time but for the first forward and the last backward of the encoder."""
    more = seconds(demand(), candidate(count)) - seconds(demand(fixed=False), candidate(count))
    of_optimizer = 0.5 + 4.0
    assert more == pytest.approx(count * (0.2 + 0.6) + (0.1 + 0.3) + of_optimizer, rel=1e-6)


def test_the_formula_says_the_same_of_equal_microbatches() -> None:
    assert step_s(demand(), candidate(4), overlapped=True) == pytest.approx(seconds(demand(), candidate(4)), rel=1e-3)


@pytest.mark.parametrize("name", SEARCHES)
def test_every_search_has_an_answer_by_the_papers_formula_which_has_neither(name: str) -> None:
    assert SEARCHES[name](demand())[0].grids == SEARCHES[name](demand(fixed=False))[0].grids


def test_colocated_ranks_take_it_for_every_microbatch_and_update_all_units() -> None:
    asked, chosen = (demand(fixed=False), demand()), candidate(4, placement="colocated")
    without, with_fixed = (seconds(one, chosen) for one in asked)
    assert with_fixed - without == pytest.approx(4 * (0.4 + 0.8) + 4.5, rel=1e-6)


def test_replicas_share_the_update_and_frozen_units_have_none() -> None:
    assert update_s(demand(), candidate(4)) == pytest.approx(4.5)
    assert update_s(demand(), candidate(2, dp=2)) == pytest.approx(0.5 + 2.0)
    assert update_s(demand(frozen=("llm",)), candidate(4)) < 0.01


def test_the_update_is_a_part_of_the_time_by_itself() -> None:
    asked = demand()
    judged = judge(asked, candidate(4), draw_batches(asked, 2, 0), "random")
    assert judged.parts[UPDATE] == pytest.approx(2 * 4.5)
    assert judged.parts[EXCHANGE] == pytest.approx(0.0, abs=1e-6)
    assert sum(judged.parts.values()) == pytest.approx(MACHINE.num_gpus * judged.step_s)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_jobs_plans_have_it_until_its_trainers_have_measured_it(schedule: str) -> None:
    topology = {"replicas": 1, "microbatches": 4, "stages": {"vision": 1, "llm": 1}}
    spec = parse_spec(
        {
            "name": "j", "sources": [{"path": "/data"}], "model": "tiny", "topology": topology,
            "execution": {"coefficients": DOCUMENT, "schedule": schedule},
        }
    )  # fmt: skip
    execution = execution_of(spec, spec.topology.topology())
    forward_s, backward_s, weights_s = execution.microbatch_s["llm"]
    assert (forward_s, backward_s + weights_s) == (0.2, pytest.approx(0.6))
    assert weights_s == pytest.approx(0.6 * 0.25 if schedule == "zero-bubble" else 0.0)
    learnt = Correction(units={"llm": UnitCorrection(scale=(1.0, 2.0, 0.0), microbatch_s=(0.01, 0.02, 0.0))})
    assert learnt.execution(execution).microbatch_s == {"vision": execution.microbatch_s["vision"], "llm": (0.01, 0.02, 0.0)}


def test_a_step_of_one_stage_takes_the_sum() -> None:
    execution = Execution(backward_factors={"llm": 2.0}, microbatch_s={"llm": (0.2, 0.6, 0.0)})
    batch = make_batch(
        np.arange(4), {"llm": np.ones(4)}, Topology(replicas=1, microbatches=4, stages={"llm": 1}), 0, execution=execution
    )
    assert predict_step(batch, np.array([[0, 1, 2, 2]])).iteration_s == pytest.approx(3 * 4 + 3 * 0.8)


def test_costs_without_ends_are_what_they_were() -> None:
    parts = {"llm": PartCosts(layers=(LayerCost(linear=1e-3),) * 4)}
    assert MeasuredCosts(parts=parts).coefficients == {"llm": (LayerCost(linear=1e-3),) * 4}
    assert dataclasses.replace(parts["llm"], step_s=(1.0, 2.0)).forward == parts["llm"].forward
