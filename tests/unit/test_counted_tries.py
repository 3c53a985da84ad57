"""What the suite itself does between two tests: a worker asks how often the next one was tried, and is not held up by it."""

from __future__ import annotations

import socket

import pytest


def test_a_worker_asks_for_the_tries_of_a_test_without_delay(request: pytest.FixtureRequest) -> None:
    if not hasattr(request.config, "workerinput"):
        pytest.skip("without workers nobody has to be asked")
    asking: socket.socket = request.config.failures_db.sock
    assert asking.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
