"""What a rank is told when it opens its session: why it has to wait, and what does not fit."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest

pytestmark = pytest.mark.integration


def wait_for(log: pytest.LogCaptureFixture, words: str) -> None:
    deadline = time.monotonic() + 30
    while words not in log.text:
        assert time.monotonic() < deadline, log.text
        time.sleep(0.02)  # polls a real service


def test_a_trainer_that_waits_for_a_preprocessor_says_so_and_goes_on_when_one_comes(
    cluster: Any, spec: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.start_reorder()
    job = cluster.submit(spec("alone", steps=1))
    done: list[int] = []
    with caplog.at_level(logging.INFO, "trainer.client"):
        training = threading.Thread(target=lambda: done.extend(cluster.consume(job)))
        training.start()
        wait_for(caplog, "job 'alone' has not begun: no preprocessor is connected: start one with `headrace preprocessor")
        cluster.add_preprocessors(1)
        training.join(60)
    assert done == [0]
    assert "does not answer" not in caplog.text
    assert caplog.text.count("no preprocessor is connected") == 1, "it is said again after a while only"
