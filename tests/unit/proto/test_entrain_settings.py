"""What a job says of strategy `entrain`: checked with the job, and left out where it says nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.errors import SpecError
from headrace.spec import load_spec_json, parse_spec

JOB: dict[str, Any] = {"name": "j", "sources": [{"path": "/data"}], "strategy": "entrain"}


@pytest.mark.parametrize("quantile", [-0.1, 1.5, True, "half"])
def test_a_threshold_that_is_no_quantile_is_refused_in_one_sentence(quantile: object) -> None:
    with pytest.raises(SpecError, match=r"entrain\.coarse_quantile") as error:
        parse_spec({**JOB, "entrain": {"coarse_quantile": quantile}})
    assert "\n" not in str(error.value)


def test_settings_are_refused_where_no_plan_uses_them() -> None:
    settings = {"coarse_quantile": 0.9}
    assert parse_spec({**JOB, "strategy": "auto", "entrain": settings}).entrain.coarse_quantile == 0.9
    with pytest.raises(SpecError, match="entrain is for the strategies entrain and auto, got 'joint': take one of them"):
        parse_spec({**JOB, "strategy": "joint", "entrain": settings})


def test_peers_of_a_former_release_see_nothing_of_settings_that_a_job_does_not_name() -> None:
    assert "entrain" not in json.loads(parse_spec(JOB).to_peer_json())
    named = parse_spec({**JOB, "entrain": {"coarse_quantile": 0.9}})
    assert load_spec_json(named.to_peer_json()) == load_spec_json(named.to_json()) == named
