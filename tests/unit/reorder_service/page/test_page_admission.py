"""Who may ask the page's API, what others are told, and what the log says of them."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest

from headrace.reorder_service.page.answers import Answer
from headrace.reorder_service.page.page_admission import Caller, PageAdmission, is_own_name
from headrace.token_folder import TokenFolder, make_tokens

TOKEN = "a-token-of-the-cluster"
CALLER = Caller(address="ipv4:10.0.0.7:51234")


def told(answer: Answer | None) -> tuple[int, str]:
    assert answer is not None
    return answer.status, json.loads(answer.body)["error"]


def ask(admission: PageAdmission, authorization: str = "", host: str = "127.0.0.1:7080") -> Answer | None:
    return admission.refusal(CALLER, "/api/jobs", authorization=authorization, host=host)


def test_the_clusters_token_is_let_in_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    admission = PageAdmission(TOKEN, None, calls_per_s=math.inf, any_host=False)
    assert ask(admission, f"Bearer {TOKEN}", host="headrace.example") is None
    with caplog.at_level(logging.WARNING):
        status, sentence = told(nothing := ask(admission))
        assert nothing is not None
        assert (status, nothing.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert "the request brought none: send `Authorization: Bearer TOKEN`" in sentence
        assert "brought another one" in told(ask(admission, "Bearer of-something-else"))[1]
        assert "brought another one" in told(ask(admission, f"Basic {TOKEN}"))[1]
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(" release")[0] for line in lines] == [
        'refused a call method="GET /api/jobs" peer=ipv4:10.0.0.7:51234 reason="no token"',
        'refused a call method="GET /api/jobs" peer=ipv4:10.0.0.7:51234 reason="unknown token"',
    ]
    assert TOKEN not in caplog.text


def test_a_token_of_a_role_that_may_watch_is_let_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = {path.name: path.read_text().strip() for path in make_tokens(tmp_path / "tokens")}
    admission = PageAdmission("", TokenFolder(tmp_path / "tokens"), calls_per_s=math.inf, any_host=False)
    answers = {role: ask(admission, f"Bearer {token}") for role, token in tokens.items()}
    assert {role for role, answer in answers.items() if answer is None} == {"watch", "submit", "train"}
    status, sentence = told(answers["preprocess"])
    assert (status, "this one has preprocess" in sentence) == (403, True)
    assert "reason=role" in caplog.text
    assert "has=preprocess takes=watch" in caplog.text


def test_a_host_that_asks_too_often_is_told_to_wait(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    admission = PageAdmission("", None, calls_per_s=2, any_host=False, now_s=lambda: now_s)
    assert [ask(admission) is None for _ in range(3)] == [True, True, False]
    status, sentence = told(ask(admission))
    assert (status, "2 requests a second of one host" in sentence) == (429, True)
    assert [record.getMessage().partition(" release")[0] for record in caplog.records] == [
        'refused a call method="GET /api/jobs" peer=ipv4:10.0.0.7:51234 reason="too many calls"'
    ]
    now_s = 1.0
    assert ask(admission) is None


def test_without_a_token_no_other_sites_scripts_are_answered(caplog: pytest.LogCaptureFixture) -> None:
    admission = PageAdmission("", None, calls_per_s=math.inf, any_host=False)
    status, sentence = told(ask(admission, host="rebound.example:7080"))
    assert (status, "this request names 'rebound.example:7080'" in sentence) == (403, True)
    (line,) = [record.getMessage() for record in caplog.records]
    assert 'peer=ipv4:10.0.0.7:51234 reason="foreign host"' in line
    assert "host=rebound.example:7080" in line
    assert ask(PageAdmission("", None, calls_per_s=math.inf, any_host=True), host="headrace.example") is None
    names = ["", "localhost", "localhost:7080", "127.0.0.1:7080", "[::1]:7080", "[::1]", "10.0.0.7", "a.localhost", "x:1", "[x"]
    assert [is_own_name(name) for name in names] == [True] * 7 + [False] * 3
