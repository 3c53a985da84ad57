"""What a job says of its trainers: checked with the job, and left out where it says nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.errors import SpecError
from headrace.spec import JobSpec, parse_spec

JOB: dict[str, Any] = {
    "name": "j",
    "sources": [{"path": "/data"}],
    "topology": {"replicas": 2, "microbatches": 4, "stages": {"vision": 1, "llm": 2}},
}


def job(**execution: Any) -> JobSpec:
    return parse_spec({**JOB, "execution": execution})


@pytest.mark.parametrize(
    ("execution", "sentence"),
    [
        ({"schedule": "2f2b"}, "no schedule '2f2b'; there are 1f1b, "),
        ({"chunks": 2}, "chunks"),
        ({"schedule": "interleaved", "chunks": 0}, "chunks"),
        ({"in_flight": 3}, "in_flight"),
        ({"units": {"audio": {"frozen": True}}}, "execution.units names 'audio', but topology.stages has vision, llm"),
        ({"units": {"llm": {"frozen_projector": True}}}, "execution: 'llm' is the last unit and has no projector behind it"),
        ({"units": {"llm": {"frozen": 1.5}}}, "frozen"),
        ({"units": {"llm": {"frozen_layers": -1}}}, "frozen_layers"),
        (
            {"units": {"llm": {"frozen": True, "frozen_layers": 1}}},
            "unit 'llm' is frozen as a whole, and so are more than its first 1 layers: take away its frozen or",
        ),
        (
            {"units": {"llm": {"frozen_layers": 4}}},
            "'llm' of the job's model has 4 layers, but frozen_layers is 4: lower it",
        ),
        ({"units": {"llm": {"dp": 3}}}, "topology.replicas says how many 'llm' has: take away its dp 3"),
        ({"units": {"vision": {"dp": 0}}}, "dp"),
        ({"units": {"vision": {"tp": 0}}}, "tp"),
        ({"units": {"llm": {"cuts": [2, 3]}}}, "execution: unit 'llm' has 2 cuts, but pp 2 x chunks 1 parts need 1"),
        (
            {"trainer": "colocated", "units": {"vision": {"dp": 3}}},
            "a dp of units is for pipelines; colocated ranks, topology.replicas of them, have all units",
        ),
        ({"memory_gib": 0}, "memory_gib"),
        ({"memory_gib": True}, "must be a number"),
        ({"bandwidth_gb_s": -1}, "bandwidth_gb_s"),
        ({"colour": "red"}, "colour"),
        ({"max_tokens": 100}, "meet and max_tokens are for `trainer: colocated`; pipelines have memory_gib"),
        (
            {"trainer": "colocated", "schedule": "gpipe"},
            "are for pipelines; colocated ranks have max_tokens",
        ),
        ({"trainer": "ddp"}, "trainer"),
        ({"trainer": "fsdp", "schedule": "gpipe", "in_flight": 2}, "schedule, in_flight are for pipelines, and with `trainer: f"),
        ({"trainer": "fsdp", "units": {"llm": {"tp": 2}}}, "tp is for pipelines, and with `trainer: fsdp` every rank has all"),
        ({"trainer": "fsdp", "units": {"llm": {"checkpointing": "auto"}}}, "take true or false with `trainer: fsdp`"),
        ({"trainer": "fsdp"}, "set it to {vision: 1, audio: 1, llm: 1}"),
        (
            {"units": {"llm": {"cp": 2}}},
            "unit 'llm' has cp 2, which is for the llm in pipelines and on FSDP ranks: set `trainer: pipeline` or",
        ),
        (
            {"trainer": "pipeline", "units": {"llm": {"cp": 2, "compile": True}}},
            "execution: unit 'llm' has cp 2 and compile true, but layers that share sequences are not compiled",
        ),
        ({"trainer": "pipeline", "units": {"llm": {"cp": "auto"}}}, "in a pipeline all share one: give a number, or take FSDP"),
        (
            {"trainer": "pipeline", "units": {"llm": {"cp": 3}, "vision": {"on": "llm"}}},
            "unit 'vision' is on the ranks of the llm, whose dp x tp x cp x pp is 12, but its own is 2: set its dp, tp or pp, or "
            "the cp of 'llm', so that every rank has a part of it",
        ),
        (
            {"trainer": "fsdp", "units": {"vision": {"cp": "auto"}}},
            "unit 'vision' has cp auto, which shares sequences of the llm, and media are not cut: take it away, or set",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_sentence(execution: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError) as error:
        job(**execution)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_more_replicas_of_a_unit_than_can_be_planned_are_refused() -> None:
    topology = {"replicas": 1, "microbatches": 4096, "stages": {"vision": 1, "llm": 2}}
    with pytest.raises(SpecError, match="16384 replicas x 4096 microbatches x 3 stages are 201326592, and at most 2097152"):
        parse_spec({**JOB, "topology": topology, "execution": {"units": {"vision": {"dp": 16384}}}})


def test_only_another_number_than_the_llms_is_a_units_own() -> None:
    execution = job(units={"vision": {"dp": 3}}).execution
    assert execution.unit_replicas(2) == {"vision": 3}
    assert execution.unit_replicas(3) == {}


def test_peers_of_a_former_release_see_nothing_of_an_execution_that_a_job_does_not_name() -> None:
    assert "execution" not in json.loads(parse_spec(JOB).to_peer_json())
    named = job(schedule="zero-bubble", units={"vision": {"frozen": True}})
    assert json.loads(named.to_peer_json())["execution"] == {"schedule": "zero-bubble", "units": {"vision": {"frozen": True}}}


def test_a_job_without_an_execution_is_still_itself_when_it_is_submitted_with_one() -> None:
    silent, named, other = parse_spec(JOB), job(schedule="gpipe"), job(schedule="zero-bubble")
    assert silent.is_same_job(silent)
    assert silent.is_same_job(named)
    assert named.is_same_job(named)
    assert not named.is_same_job(other)
    assert not named.is_same_job(silent), "what it was planned for is not forgotten"
    pipelines = named.with_execution(named.execution.model_copy(update={"trainer": "pipeline"}))
    assert named.is_same_job(pipelines), "the kind of trainer is what a topology adds"
    assert not pipelines.is_same_job(named)
    assert not silent.is_same_job(parse_spec({**JOB, "seed": 1}))
    other_stages = {**JOB, "topology": {**JOB["topology"], "stages": {"vision": 2, "llm": 2}}}
    assert silent.is_same_job(parse_spec({**other_stages, "execution": {"schedule": "gpipe"}})), "they come with a topology"
    assert not silent.is_same_job(parse_spec(other_stages))


def test_another_topology_must_still_have_the_units() -> None:
    frozen = job(units={"vision": {"frozen": True}})
    with pytest.raises(SpecError, match=r"execution\.units names 'vision'"):
        frozen.with_topology(frozen.topology.changed(stages={"audio": 1, "llm": 2}))
