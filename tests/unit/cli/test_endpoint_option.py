"""Which reorder service a command asks: an argument, the environment, the default."""

from __future__ import annotations

import argparse

import pytest

from headrace.cli.endpoint import DEFAULT_ENDPOINT, ENDPOINT, add_endpoint
from headrace.cli.main import COMMANDS, _parser

POSITIONAL = {"job": ["list"], "audit": ["demo"], "replay": ["demo", "key"], "train": ["--job", "demo"]}
ASKING = ("job", "top", "audit", "scale", "preprocessor", "train", "doctor", "health")


@pytest.mark.parametrize("command", ASKING)
def test_the_environment_names_the_service(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT, "10.0.0.1:7070,10.0.0.2:7070")
    rest = POSITIONAL.get(command, [])
    parser = _parser({command})
    assert named(parser.parse_args([command, *rest])) == "10.0.0.1:7070,10.0.0.2:7070"
    assert named(parser.parse_args([command, *rest, "--endpoint", "a:1"])) == "a:1"


def named(args: argparse.Namespace) -> str:
    return str(args.endpoint)


def test_without_any_it_is_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT, "")
    assert named(_parser({"preprocessor"}).parse_args(["preprocessor"])) == DEFAULT_ENDPOINT
    assert named(_parser({"preprocessor"}).parse_args(["preprocessor", "--reorder", "a:1"])) == "a:1"
    assert _parser({"doctor"}).parse_args(["doctor"]).endpoint is None


def test_help_says_so() -> None:
    parser = argparse.ArgumentParser()
    add_endpoint(parser)
    assert f"(default: ${ENDPOINT}, else {DEFAULT_ENDPOINT})" in " ".join(parser.format_help().split())
    assert set(ASKING) <= COMMANDS.keys()
