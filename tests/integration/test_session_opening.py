"""What a rank is told when it opens its session: why it has to wait, and what does not fit."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from typing import Any

import pytest

from headrace import trainer
from headrace.errors import ConflictError, UserError
from headrace.processes import Process

pytestmark = pytest.mark.integration


def wait_for(log: pytest.LogCaptureFixture, words: str) -> None:
    deadline = time.monotonic() + 30
    while words not in log.text:
        assert time.monotonic() < deadline, log.text
        time.sleep(0.02)  # polls a real service


@pytest.mark.slow
def test_a_trainer_that_waits_for_a_preprocessor_says_so_and_goes_on_when_one_comes(
    cluster: Any, spec: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.start_reorder()
    job = cluster.submit(spec("alone", steps=1))
    done: list[int] = []
    with caplog.at_level(logging.INFO, "headrace.trainer.loading.session"):
        training = threading.Thread(target=lambda: done.extend(cluster.consume(job)))
        training.start()
        wait_for(caplog, "job 'alone' has not begun: no preprocessor is connected: start one with `headrace preprocessor")
        cluster.add_preprocessors(1)
        training.join(60)
    assert done == [0]
    assert "does not answer" not in caplog.text
    assert caplog.text.count("no preprocessor is connected") == 1, "it is said again after a while only"


def test_a_second_process_for_a_rank_is_refused_while_the_first_is_connected(
    calm: Any, spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that all say they are rank 0, say, or those of a tensor-parallel group."""
    monkeypatch.setattr("headrace.trainer.loading.session.OCCUPIED_TIMEOUT_S", 1.0)
    job = calm.submit(spec("twice", steps=2))
    with trainer.connect(calm.endpoint, job=job) as former:
        steps = iter(former)
        first = next(steps)
        list(first)
        with pytest.raises(
            ConflictError, match=r"another process is connected as rank 0 of 1.*tensor-, context- and pipeline-parallel"
        ):
            trainer.connect(calm.endpoint, job=job).open()
        former.commit(first)
        assert next(steps).index == 1
    with trainer.connect(calm.endpoint, job=job) as latter:
        assert next(iter(latter)).index == 1


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_gone_or_hangs_leaves_its_place_to_another(cluster: Any, spec: Any, sent: signal.Signals) -> None:
    cluster.start_reorder()
    cluster.add_preprocessors(1)
    job = cluster.submit(spec("replaced", steps=40))
    arguments = ["train", "--endpoint", cluster.endpoint, "--job", job, "--threads", "1"]
    training = cluster.group.add(Process("trainer", arguments, cluster.folder / "trainer.log"))
    deadline = time.monotonic() + 100
    while not cluster.ledger(job):
        assert time.monotonic() < deadline
        time.sleep(0.05)  # polls a real service
    os.kill(training.pid, sent)
    with trainer.connect(cluster.endpoint, job=job) as loader:
        assert next(iter(loader)).index == len(cluster.ledger(job))
    os.kill(training.pid, signal.SIGKILL)


def test_more_ranks_than_replicas_are_refused_with_the_remedy(calm: Any, spec: Any) -> None:
    """As where tensor-parallel ranks are counted."""
    job = calm.submit(spec("too-many", steps=2))
    with pytest.raises(
        UserError, match=r"2 replica\(s\) for 3 ranks: use at most 2 \(tensor-, context- and pipeline-parallel ranks share one"
    ):
        trainer.connect(calm.endpoint, job=job, rank=2, num_ranks=3).open()


def test_a_process_waits_for_one_that_is_connected_as_its_rank_and_is_noticed_to_be_gone_late(
    calm: Any, spec: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The call itself does not wait for long: the former one goes when the latter has been told what it waits for."""
    job = calm.submit(spec("late", steps=2))
    opened: list[int] = []

    def take_over() -> None:
        with trainer.connect(calm.endpoint, job=job) as latter:
            opened.append(latter.next_step)

    with caplog.at_level(logging.INFO, "headrace.trainer.loading.session"):
        former = trainer.connect(calm.endpoint, job=job).open()
        waiting = threading.Thread(target=take_over)
        waiting.start()
        wait_for(caplog, "waiting for job=late: another process is connected as rank 0 of 1")
        assert not opened
        former.close()
        waiting.join(60)
    assert opened == [0]
