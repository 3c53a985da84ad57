"""Validation sets of a job: what is refused when a job is submitted, and which job an evaluation is."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import SpecError, UserError
from headrace.spec import JobSpec, load_spec_json, parse_spec
from headrace.topology_spec import TopologySpec
from headrace.validation_spec import evaluation_of, is_evaluation_of

SETS = {"web": {"sources": [{"path": "/web", "split": "validation"}]}}


def spec(validation: Any = SETS, **fields: Any) -> JobSpec:
    return parse_spec({"name": "demo", "sources": [{"path": "/data", "weight": 2}], "validation": validation, **fields})


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ({"weight": 2}, "source 'web' has weight 2.0, but an evaluation has each sample of a set once: leave weight out"),
        ({"repetitions": 0.5}, "has repetitions 0.5"),
        ({"max_epochs": 1}, "has max_epochs 1"),
        ({"on_bad": "substitute"}, "has on_bad substitute"),
        ({"path": "/web.yaml"}, "/web.yaml is a blend of data sets: name its data sets one by one"),
    ],
)
def test_a_source_that_would_not_give_each_sample_once_is_refused(source: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError, match=rf"validation.web: .*{sentence}"):
        spec({"web": {"sources": [{"path": "/web"} | source]}})


def test_names_that_no_job_can_have_are_refused() -> None:
    with pytest.raises(SpecError, match=r"'a b'"):
        spec({"a b": SETS["web"]})
    with pytest.raises(SpecError, match="an evaluation of set 'web' is a job of its own, whose name would have 77 characters"):
        spec(name="x" * 63)
    assert len(evaluation_of(spec(name="x" * 49), "web").name) == 63


def test_an_evaluation_is_one_epoch_of_the_set_in_order() -> None:
    job = spec(steps=1000, epochs=3, window=8, global_batch=7, pack_tokens=32768, text={"max_tokens": 16384})
    evaluation = evaluation_of(job, "web")
    assert [source.path for source in evaluation.sources] == ["/web"]
    assert (evaluation.epochs, evaluation.steps, evaluation.shuffle, evaluation.window) == (1, None, False, 2)
    assert (evaluation.global_batch, evaluation.pack_tokens) == (7, 32768)
    assert not evaluation.validation
    assert load_spec_json(evaluation.to_json()) == evaluation


def test_its_name_follows_from_how_it_is_planned_so_that_all_ranks_name_it_alike() -> None:
    job, other = spec(), spec().with_topology(TopologySpec(replicas=2))
    name = evaluation_of(job, "web").name
    assert name.startswith("demo.eval.web-")
    assert evaluation_of(load_spec_json(job.to_peer_json()), "web").name == name
    assert evaluation_of(other, "web").name != name
    assert is_evaluation_of(name, job)
    assert is_evaluation_of(evaluation_of(other, "web").name, job)
    assert not any(
        is_evaluation_of(another, job) for another in ("demo", "demo.eval.web", "demo.eval.web-more", "demo.eval.x-0123")
    )


def test_a_set_that_is_not_there_is_named_beside_those_that_are() -> None:
    with pytest.raises(UserError, match="job 'demo' has no validation set 'chats': it has web"):
        evaluation_of(spec(), "chats")
    with pytest.raises(UserError, match="name its sources in `validation:`"):
        evaluation_of(spec({}), "web")
