"""What the driver of preprocessors on Ray checks and hands on, without a Ray cluster."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.cli.ray_engine.ray_driver import check_reach, passed_on
from headrace.cli.ray_engine.ray_options import ray_settings
from headrace.cli.run import preprocessor
from headrace.cli.run.authority import make_papers
from headrace.errors import UserError

NODE = "10.0.0.7"


@pytest.fixture(autouse=True)
def no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADRACE_CLUSTER_TOKEN", "HEADRACE_CLUSTER_TOKEN_FILE", "HEADRACE_TLS", "HEADRACE_TOKENS"):
        monkeypatch.delenv(name, raising=False)


def check(*options: str, nodes: Sequence[str] = (NODE,)) -> None:
    parser = argparse.ArgumentParser()
    preprocessor.add_arguments(parser)
    arguments = ["--engine", "ray", *options]
    args = parser.parse_args(arguments)
    args.arguments = ["preprocessor", *arguments]
    settings = ray_settings(args)
    assert settings is not None
    check_reach(args, settings, list(nodes))


def test_on_a_node_in_the_network_preprocessors_take_a_token_and_tls_or_somebody_who_goes_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(nodes=["127.0.0.1"])
    check("--listen", "127.0.0.1:0")
    check("--allow-anyone", "--allow-plaintext")
    with pytest.raises(UserError, match=f"{NODE}:0 lets in whoever .* in the clear"):
        check()
    with pytest.raises(UserError, match=f"{NODE}:0 lets in whoever"):
        check("--allow-plaintext")
    check("--allow-plaintext", "--tokens", str(tmp_path))
    monkeypatch.setenv("HEADRACE_CLUSTER_TOKEN", "a-token-of-the-whole-cluster")
    check("--allow-plaintext")
    with pytest.raises(UserError, match=f"{NODE}:0 sends tokens and data in the clear"):
        check()
    assert list(make_papers(tmp_path, 1, renew=False))
    monkeypatch.setenv("HEADRACE_TLS", str(tmp_path / "preprocessor"))
    check()
    monkeypatch.setenv("HEADRACE_TLS", str(tmp_path / "client"))
    with pytest.raises(UserError, match="name the folder with its own papers"):
        check()


def test_a_service_on_loopback_is_refused_where_there_are_several_nodes() -> None:
    doors = ("--allow-anyone", "--allow-plaintext")
    check(*doors, "--reorder", "127.0.0.1:7070")
    check(*doors, "--reorder", "10.0.0.1:7070", nodes=[NODE, "10.0.0.8"])
    with pytest.raises(UserError, match="name an address that all 2 nodes of Ray reach"):
        check(*doors, "--reorder", "127.0.0.1:7070", nodes=[NODE, "10.0.0.8"])


def test_preprocessors_are_given_what_is_headraces_but_not_the_password_of_the_store() -> None:
    theirs = {"HEADRACE_CLUSTER_TOKEN_FILE": "/shared/token", "HEADRACE_TLS": "/shared/papers/preprocessor"}
    kept = {"HEADRACE_STORE": "rediss://headrace:PASSWORD@store:6380/0", "HOME": "/root"}
    assert passed_on({**theirs, **kept}) == theirs
