"""Specs of a newer release: what this one does not know is ignored from peers, and refused where it would act on it."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from headrace.errors import SpecError
from headrace.message_codec import rejection_value
from headrace.peer_spec import SAMPLE_FIELDS, load_peer_spec_json, load_stored_json
from headrace.quarantine import Reason
from headrace.spec import JobSpec, load_spec_json, parse_spec
from headrace.topology_spec import TopologySpec
from headrace.v1.common_pb2 import Rejection

SPEC = parse_spec({"name": "j", "sources": [{"path": "/d"}], "topology": {"replicas": 2}})


def newer(**sections: dict[str, Any]) -> str:
    """The spec as a newer release writes it: `sections` have fields more, "" is the document itself."""
    document = json.loads(SPEC.to_json())
    document |= sections.pop("", {})
    for section, fields in sections.items():
        (document["sources"][0] if section == "sources" else document[section]).update(fields)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (newer(**{"": {"later": {"a": 1}}}), "later"),
        (newer(execution={"later": 2}), "execution.later"),
        (newer(image={"later": 2}), "image.later"),
        (newer(sources={"later": 2}), "sources.0.later"),
    ],
)
def test_a_field_more_is_ignored_from_a_peer_and_named_in_the_log_and_refused_from_a_user(
    text: str, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert load_peer_spec_json(text) == SPEC
    assert f"fields={field}" in caplog.text
    with pytest.raises(SpecError, match=f"{field}: there is no such field"):
        load_spec_json(text)


def test_one_that_changes_what_a_preprocessor_makes_of_records_is_refused_by_it() -> None:
    assert load_peer_spec_json(newer(execution={"later": 2}, **{"": {"more": 1}}), SAMPLE_FIELDS) == SPEC
    for section in SAMPLE_FIELDS:
        with pytest.raises(SpecError, match="later: there is no such field"):
            load_peer_spec_json(newer(**{section: {"later": 2}}), SAMPLE_FIELDS)


def test_what_is_wrong_beside_an_unknown_field_is_refused() -> None:
    with pytest.raises(SpecError, match="global_batch"):
        load_peer_spec_json(newer(**{"": {"later": 1, "global_batch": 0}}))
    with pytest.raises(SpecError, match=r"below text\.max_tokens"):  # a rule over several fields
        load_peer_spec_json(newer(**{"": {"later": 1, "pack_tokens": 1}}))


def test_a_stored_spec_is_taken_up_where_the_job_does_not_use_what_is_new() -> None:
    text = newer(topology={"later": 7}, **{"": {"more": None}})
    assert load_stored_json(JobSpec, text, "job spec", SPEC.to_peer_json()) == SPEC
    topology = json.dumps(json.loads(text)["topology"])
    assert load_stored_json(TopologySpec, topology, "topology", SPEC.to_peer_json()) == SPEC.topology
    used = json.dumps(json.loads(SPEC.to_peer_json()) | {"more": 3})
    with pytest.raises(SpecError, match=r"more: there is no such field, got 3; if a newer release has written it, run that one"):
        load_stored_json(JobSpec, text, "job spec", used)
    with pytest.raises(SpecError, match="there is no such field"):  # nobody says whether the job uses it
        load_stored_json(JobSpec, text, "job spec", "")


def test_a_reason_that_only_a_newer_release_knows_is_kept_in_the_detail() -> None:
    item = rejection_value(Rejection(name="s/a/1", reason="bad_video", detail="no frames", sample_id=3))
    assert (item.reason, item.detail) == (Reason.OTHER, "bad_video: no frames")
    assert rejection_value(Rejection(name="s", reason="too_long", detail="9 > 8")).reason is Reason.TOO_LONG
