"""What the driver of preprocessors on Ray checks and hands on, without a Ray cluster."""

from __future__ import annotations

from headrace.cli.ray_engine.ray_driver import passed_on


def test_preprocessors_are_given_what_is_headraces_but_not_the_password_of_the_store() -> None:
    theirs = {"HEADRACE_CLUSTER_TOKEN_FILE": "/shared/token", "HEADRACE_TLS": "/shared/papers/preprocessor"}
    kept = {"HEADRACE_STORE": "rediss://headrace:PASSWORD@store:6380/0", "HOME": "/root"}
    assert passed_on({**theirs, **kept}) == theirs
