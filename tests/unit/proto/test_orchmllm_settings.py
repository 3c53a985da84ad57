"""What a job says of strategy `orchmllm`: checked with the job, and left out where it says nothing."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from headrace.errors import SpecError
from headrace.orchmllm_settings import OrchMLLMSettings
from headrace.reorder_service.planning.post_balancing_options import FORMS, PostBalancing
from headrace.spec import load_spec_json, parse_spec
from headrace.topology_spec import load_topology_json

JOB: dict[str, Any] = {"name": "j", "sources": [{"path": "/data"}], "strategy": "orchmllm"}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"forms": {"vision": "padded"}}, "orchmllm.forms names 'vision', but topology.stages has encoder, llm"),
        ({"forms": {"llm": "fifth"}}, "orchmllm.forms.llm: must be 'no_padding', 'padded', 'third' or 'fourth', got 'fifth'"),
        ({"lambda": -0.5}, "orchmllm.lambda: must be greater than or equal to 0, got -0.5"),
        ({"tolerance": 0}, "orchmllm.tolerance: must be greater than 0, got 0"),
        ({"ranks_per_node": -8}, "orchmllm.ranks_per_node: must be greater than or equal to 0, got -8"),
        ({"quadratic": 1}, "orchmllm.quadratic: there is no such field"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError) as error:
        parse_spec({**JOB, "orchmllm": settings})
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_settings_are_refused_where_no_plan_uses_them() -> None:
    settings = {"ranks_per_node": 8}
    assert parse_spec({**JOB, "strategy": "auto", "orchmllm": settings}).orchmllm.ranks_per_node == 8
    with pytest.raises(SpecError, match="orchmllm is for the strategies orchmllm and auto, got 'joint': take one of them"):
        parse_spec({**JOB, "strategy": "joint", "orchmllm": settings})


def test_peers_of_a_former_release_see_nothing_of_settings_that_a_job_does_not_name() -> None:
    assert "orchmllm" not in json.loads(parse_spec(JOB).to_peer_json())
    settings = {"forms": {"encoder": "padded"}, "lambda": 0.5}
    named = parse_spec({**JOB, "orchmllm": settings})
    assert json.loads(named.to_peer_json())["orchmllm"] == settings
    assert load_spec_json(named.to_peer_json()) == load_spec_json(named.to_json()) == named


def test_another_topology_must_still_have_the_units() -> None:
    spec = parse_spec({**JOB, "orchmllm": {"forms": {"encoder": "padded"}}})
    with pytest.raises(SpecError, match=r"orchmllm\.forms names 'encoder', but topology\.stages has vision, llm"):
        spec.with_topology(load_topology_json('{"stages": {"vision": 1, "llm": 2}}'))


def test_the_planner_has_every_form_and_the_same_defaults() -> None:
    for form in FORMS:
        assert parse_spec({**JOB, "orchmllm": {"forms": {"llm": form}}}).orchmllm.forms == {"llm": form}
    said, planned = OrchMLLMSettings(), PostBalancing()
    assert {name: getattr(said, name) for name in type(said).model_fields} == {
        field.name: getattr(planned, field.name) for field in fields(planned)
    }
