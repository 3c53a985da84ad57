"""A live job's plans are made for what its trainers run: schedule, frozen units, checkpointing, memory and links."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from headrace.entrain_settings import EntrainSettings
from headrace.errors import SpecError
from headrace.plan import StepPlan, Topology
from headrace.reorder_service.jobs.job_execution import check_coefficients, execution_of
from headrace.reorder_service.jobs.planned_step import PlannedStep
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.post_balancing_options import PostBalancing
from headrace.sample import Probe, SampleRef
from headrace.spec import JobSpec, load_spec_json, parse_spec

STAGES = {"vision": 1, "llm": 2}
TOPOLOGY = Topology(replicas=2, microbatches=4, stages=STAGES)


def job(**execution: Any) -> JobSpec:
    topology = {"replicas": 2, "microbatches": 4, "stages": STAGES}
    document = {"name": "j", "sources": [{"path": "/data"}], "model": "7b", "text": {"max_tokens": 12_000}}
    return parse_spec(document | {"topology": topology, "execution": execution})


def planned(spec: JobSpec) -> PlannedStep:
    """A planned step of 32 samples, of which every second one has an image."""
    rng = np.random.default_rng(3)
    step = PlannedStep(index=0, refs=[SampleRef(sample_id=i, shard=0, row=i) for i in range(32)])
    for i in range(32):
        patches = (4 * int(rng.integers(64, 512)),) if i % 2 else ()
        step.probes[i] = Probe(
            name=f"s/{i}", num_tokens=int(rng.integers(100, 2000)), num_targets=10, image_patches=patches, mel_frames=()
        )
    step.sample_ids = np.arange(32)
    step.cut(step.make_plan(spec, spec.topology, vocab=0, generation=1), part_samples=16, ticket=str)
    return step


def seconds(**execution: Any) -> float:
    step = planned(job(**execution))
    assert step.plan is not None
    assert step.plan.predicted is not None
    return step.plan.predicted.iteration_s


def test_a_job_that_says_nothing_is_planned_as_an_ideal_1f1b_pipeline_in_which_all_learns() -> None:
    assumed, ideal = execution_of(job(), TOPOLOGY), Execution()
    for unit in STAGES:
        assert assumed.factors(unit) == ideal.factors(unit)
    assert (assumed.schedule, assumed.memory_limit, assumed.bytes_per_s) == ("1f1b", math.inf, math.inf)


def test_what_the_job_says_reaches_the_planner() -> None:
    units = {"vision": {"frozen": True}, "llm": {"checkpointing": True}}
    spec = job(schedule="zero-bubble", units=units, memory_gib=2, bandwidth_gb_s=25, latency_us=10)
    execution = execution_of(spec, TOPOLOGY)
    assert execution.schedule == "zero-bubble"
    assert execution.backward_factor("vision") == 0, "nothing in front of it learns"
    assert execution.backward_factor("llm") == 3, "the projector of vision learns, and the forward runs again"
    assert (execution.memory_limit, execution.bytes_per_s, execution.latency_s) == (2 * 2**30, 25e9, 1e-5)


def test_fsdp_ranks_meet_behind_every_unit_and_samples_may_change_their_rank_there() -> None:
    stages = {"vision": 1, "llm": 1}
    topology = {"replicas": 2, "microbatches": 4, "stages": stages}
    execution = {"trainer": "fsdp", "units": {"vision": {"frozen": True}}}
    spec = parse_spec({"name": "j", "sources": [{"path": "/data"}], "topology": topology, "execution": execution})
    planned = execution_of(spec, Topology(replicas=2, microbatches=4, stages=stages))
    assert (planned.colocated, planned.may_cross_replicas, planned.backward_factor("vision")) == ("phases", True, 0)


@pytest.mark.parametrize(("trainer", "may_cross"), [(None, False), ("colocated", False), ("pipeline", True)])
def test_samples_change_replicas_only_where_the_job_says_that_its_trainers_are_pipelines(trainer: Any, may_cross: bool) -> None:
    assert execution_of(job(trainer=trainer), TOPOLOGY).may_cross_replicas == may_cross


def test_the_planner_deals_samples_to_the_replicas_that_the_job_says_a_unit_has() -> None:
    spec = job(units={"vision": {"dp": 3}})
    assert execution_of(spec, TOPOLOGY).unit_replicas == {"vision": 3}
    plan = planned(spec).plan
    assert isinstance(plan, StepPlan)
    assert [len(replica) for replica in plan.unit_replicas["vision"]] == [4, 4, 4]
    assert seconds(units={"vision": {"dp": 1}}) > seconds() > seconds(units={"vision": {"dp": 4}})


def test_a_frozen_projector_leaves_a_frozen_llm_nothing_to_do_in_its_backward() -> None:
    units = {"vision": {"frozen": True, "frozen_projector": True}, "llm": {"frozen": True}}
    assert execution_of(job(units=units), TOPOLOGY).backward_factor("llm") == 0


def test_frozen_first_layers_take_their_share_of_the_backward_away() -> None:
    units = {"vision": {"frozen_layers": 24}, "llm": {"frozen_layers": 7}}
    execution = execution_of(job(units=units, schedule="zero-bubble"), TOPOLOGY)
    assert execution.backward_factor("vision") == pytest.approx(2 * 8 / 32), "24 of 32 layers have nothing to do"
    assert execution.backward_factor("llm") == pytest.approx(1 + 21 / 28), "7 of 28 layers only pass gradients on"
    assert execution.factors("llm")[2] == pytest.approx(21 / 28)


def test_entrains_threshold_reaches_the_planner() -> None:
    spec = job().model_copy(update={"entrain": EntrainSettings(coarse_quantile=0.9)})
    assert execution_of(spec, TOPOLOGY).stratification.coarse_quantile == 0.9


def test_the_forecast_of_a_step_follows_what_the_trainers_run() -> None:
    learning = seconds()
    assert seconds(units={"vision": {"frozen": True}}) < learning
    assert seconds(units={"llm": {"checkpointing": True}}) > learning
    assert seconds(schedule="gpipe") >= learning
    assert seconds(latency_us=1e5) > learning
    assert seconds(bandwidth_gb_s=0.01) > learning


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble"])
def test_the_samples_of_a_step_do_not_depend_on_its_execution(schedule: str) -> None:
    step = planned(job(schedule=schedule, memory_gib=48))
    assert sorted(ref.sample_id for part in step.parts.values() for ref in part.samples) == list(range(32))


def test_a_memory_limit_makes_another_plan_of_a_live_job() -> None:
    free, tight = planned(job()).plan, planned(job(memory_gib=22)).plan
    assert free is not None
    assert tight is not None
    assert free.replicas != tight.replicas


def test_a_memory_limit_that_no_plan_keeps_is_refused_by_how_much() -> None:
    with pytest.raises(ValueError, match=r"no plan was found whose activations keep within 6 GiB: .* exceeds that by .* GiB"):
        planned(job(memory_gib=6))


def test_a_sample_that_exceeds_the_memory_limit_by_itself_is_named_before_anything_is_decoded() -> None:
    with pytest.raises(ValueError, match=r"the activations of sample s/29 alone take .* GiB more than the limit of 0\.001 GiB;"):
        planned(job(memory_gib=0.001))


@pytest.mark.parametrize("meet", ["microbatch", "step"])
def test_colocated_ranks_of_a_live_job_get_microbatches_of_even_seconds_and_few_enough_tokens(meet: str) -> None:
    step = planned(job(trainer="colocated", meet=meet, max_tokens=12_000))
    assert step.plan is not None
    assert step.plan.chosen == "colocated"
    tokens = {i: probe.num_tokens for i, probe in step.probes.items()}
    for replica in step.plan.replicas:
        for microbatch in replica:
            assert microbatch.units["vision"] == microbatch.units["llm"], "a rank has all units"
            assert sum(tokens[i] for i in microbatch.units["llm"]) <= 12_000
    assert step.plan.predicted is not None
    assert step.plan.predicted.bubble < 0.05
    assert planned(job()).plan.chosen != "colocated"  # type: ignore[union-attr]


# -- measured costs ----------------------------------------------------------------------------------------------------

BACKWARD = {"input_gradients": 1.25, "weight_gradients": 0.75, "rerun": 1.5}


def coefficients(speed: float = 1.0, **units: Any) -> dict[str, Any]:
    """Of model 7b on a device of that speed; vision takes as long a token as the LLM, which is not what operations say."""
    layers = {"vision": 32, "llm": 28}
    parts = {unit: {"layers": n, "linear_s": 1e-5 / n / speed, "backward": BACKWARD} for unit, n in layers.items()}
    return {"model": "7b", "units": parts | units}


def test_a_job_with_measured_costs_is_planned_with_their_forward_and_backward() -> None:
    spec = job(coefficients=coefficients(), units={"llm": {"checkpointing": True}}, schedule="zero-bubble")
    execution = execution_of(spec, TOPOLOGY)
    assert execution.factors("vision") == pytest.approx((1.0, 1.25, 0.75))
    assert execution.factors("llm") == pytest.approx((1.0, 1.25 + 1.5, 0.75))
    step = planned(spec)
    tokens = [step.probes[i].num_tokens for i in range(32)]
    patches = [sum(step.probes[i].image_patches) for i in range(32)]
    assert step.costs["llm"] == pytest.approx(np.array(tokens) * 1e-5)
    assert step.costs["vision"] == pytest.approx(np.array(patches) * 1e-5)


def test_twice_the_measured_speed_halves_the_forecast_of_the_same_plan() -> None:
    slow, fast = planned(job(coefficients=coefficients())), planned(job(coefficients=coefficients(2.0)))
    assert slow.plan is not None
    assert fast.plan is not None
    assert slow.plan.replicas == fast.plan.replicas
    assert slow.plan.predicted is not None
    assert fast.plan.predicted is not None
    assert slow.plan.predicted.iteration_s == pytest.approx(2 * fast.plan.predicted.iteration_s)


def test_measured_costs_change_the_plan_but_not_the_samples_of_the_step() -> None:
    counted, measured = planned(job()), planned(job(coefficients=coefficients()))
    assert counted.plan is not None
    assert measured.plan is not None
    assert counted.plan.replicas != measured.plan.replicas
    assert counted.plan.sample_ids() == measured.plan.sample_ids() == list(range(32))


def test_a_plan_with_measured_costs_is_the_same_on_every_machine_that_reads_the_spec() -> None:
    spec = job(coefficients=coefficients())
    read = load_spec_json(spec.to_json())
    assert read == spec
    assert planned(read).plan == planned(spec).plan


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        (coefficients(llm={"layers": 4, "linear_s": 1.0}), "have 4 layers of llm, but model '7b' has 28"),
        (coefficients(llm={"layers": 28, "linear_s": -1.0}), "units.llm.linear_s must be a number from 0 to 1e+09, got -1.0"),
        (coefficients(generator={"layers": 2, "linear_s": 1.0}), "have a part 'generator', but model '7b' has only"),
        ({"units": {"llm": {"layers": 28, "linear_s": 1.0}}}, "have llm, but the job's units need vision too"),
        ({}, "a coefficients file has one field, 'units'"),
    ],
)
def test_costs_that_the_job_cannot_be_planned_with_are_refused_in_one_sentence(document: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError, match=re.escape(sentence)) as caught:
        check_coefficients(job(coefficients=document))
    assert str(caught.value).startswith("execution.coefficients: ")
    assert "\n" not in str(caught.value)


def of_orchmllm(**settings: Any) -> JobSpec:
    topology = {"replicas": 4, "microbatches": 1, "stages": STAGES}
    job = {"name": "j", "sources": [{"path": "/data"}], "model": "7b", "strategy": "orchmllm", "topology": topology}
    return parse_spec({**job, "orchmllm": settings})


def vision_batches(**settings: Any) -> list[tuple[int, ...]]:
    """The samples of vision's microbatch on each replica."""
    plan = planned(of_orchmllm(**settings)).plan
    assert isinstance(plan, StepPlan)
    return [replica[0].units["vision"] for replica in plan.replicas]


def test_what_the_job_says_of_orchmllm_reaches_the_planner() -> None:
    settings = {"forms": {"vision": "fourth", "llm": "third"}, "lambda": 0.3, "tolerance": 0.02, "ranks_per_node": 2}
    spec = of_orchmllm(**settings)
    options = execution_of(spec, TOPOLOGY).post_balancing
    assert options == PostBalancing(forms={"vision": "fourth", "llm": "third"}, quadratic=0.3, tolerance=0.02, ranks_per_node=2)


def test_forms_change_a_jobs_batches_and_nodes_change_only_their_ranks() -> None:
    plain, padded, on_nodes = vision_batches(), vision_batches(forms={"vision": "padded"}), vision_batches(ranks_per_node=2)
    assert sorted(padded) != sorted(plain)
    assert on_nodes != plain
    assert sorted(on_nodes) == sorted(plain)


def test_ranks_that_share_the_llms_sequences_take_equal_parts_of_its_time_and_memory() -> None:
    """The plan has the replicas that the job says, each of so many ranks."""
    alone, shared = (planned(job(trainer="pipeline", units={"llm": {"cp": cp}} if cp > 1 else {})) for cp in (1, 4))
    assert np.allclose(shared.estimated["llm"], alone.estimated["llm"] / 4)
    assert np.array_equal(shared.estimated["vision"], alone.estimated["vision"])
    assert shared.plan is not None
    assert (shared.plan.topology.replicas, shared.plan.degrees) == (2, {})
    guest = job(trainer="pipeline", units={"llm": {"cp": 4}, "vision": {"on": "llm", "dp": 16}})
    sharing = execution_of(guest, TOPOLOGY).sharing
    assert sharing is not None
    assert sharing.slices == {"vision": 1, "llm": 4}, "four ranks of the LLM take their actions together"
    limit = {"trainer": "pipeline", "memory_gib": 8}
    with pytest.raises(ValueError, match="memory"):
        planned(job(**limit))
    planned(job(**limit, units={"llm": {"cp": 4}}))
