"""A preprocessor that loses its reorder service again and again: a line for each loss, and no word of Python's insides."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from tests.wire import free_ports

pytestmark = pytest.mark.integration

LOSSES = 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGTERM, id="ended", marks=pytest.mark.slow)],
)
def test_the_log_of_a_lost_leader_has_no_error(cluster: Any, spec: Any, number: signal.Signals) -> None:
    listen = f"127.0.0.1:{free_ports(1)[0]}"
    cluster.start_reorder(listen)
    cluster.add_preprocessors(1)
    log = cluster.preprocessors[0].log
    job = cluster.submit(spec("job", steps=40, window=4))

    def wait_for(text: str, count: int) -> None:
        deadline = time.monotonic() + 100
        while (lines := log.read_text()).count(text) < count:
            assert time.monotonic() < deadline, lines
            time.sleep(0.01)  # polls a real process

    for loss in range(1, LOSSES + 1):
        wait_for("INFO connected ", loss)
        cluster.wait_for_state(job, "running")
        os.kill(cluster.reorder.pid, number)
        cluster.reorder.wait(10)
        wait_for("not connected ", loss)
        cluster.start_reorder(listen)
    wait_for("INFO connected ", LOSSES + 1)
    os.kill(cluster.preprocessors[0].pid, signal.SIGTERM)
    cluster.preprocessors[0].wait(10)
    lines = log.read_text().splitlines()
    assert not [line for line in lines if " ERROR " in line or "Task " in line or "Traceback" in line or "Error" in line]
