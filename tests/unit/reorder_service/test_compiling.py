"""Whoever waits for a planner that is compiled reads how far it is."""

from __future__ import annotations

import logging
import time

import numba
import pytest

from headrace.reorder_service.compiling import compiled

PATIENCE_S = 60.0


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")
async def test_what_takes_long_is_said_to_go_on(caplog: pytest.LogCaptureFixture) -> None:
    kernels = [numba.njit(lambda x: x + 1), numba.njit(lambda x: x + 2)]

    def warm_up() -> None:
        for kernel in kernels:
            kernel(1)
        deadline_s = time.monotonic() + PATIENCE_S
        while "2 functions so far" not in caplog.text and time.monotonic() < deadline_s:
            time.sleep(0.01)

    with caplog.at_level(logging.INFO):
        await compiled(warm_up, cached_s=0.0, between_s=0.01)
    assert caplog.messages[0].startswith("compiling the planner: a minute or two")
    assert "2 functions so far" in caplog.text


async def test_what_is_there_is_not_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        await compiled(lambda: None)
    assert caplog.messages == []


async def test_an_error_is_raised() -> None:
    def fail() -> None:
        raise ValueError("bug")

    with pytest.raises(ValueError, match="bug"):
        await compiled(fail, cached_s=0.0)
