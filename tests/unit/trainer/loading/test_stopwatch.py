"""Laps by key, and what a step measures of the loop over its microbatches."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from headrace.measured import ALL_UNITS, MeasuredWork
from headrace.schedule import Kind
from headrace.trainer.loading.steps import Microbatch, Step
from headrace.trainer.loading.stopwatch import Stopwatch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that it is; assign to its only entry."""
    now = [0.0]
    monkeypatch.setattr("headrace.trainer.loading.stopwatch.time.perf_counter", lambda: now[0])
    return now


def test_laps_of_one_key_add_up(clock: list[float]) -> None:
    watch = Stopwatch[str](on_gpu=False)
    for began_s, ended_s, key in ((1.0, 2.0, "a"), (5.0, 5.5, "b"), (6.0, 8.0, "a")):
        clock[0] = began_s
        watch.start()
        clock[0] = ended_s
        watch.stop(key)
    assert watch.seconds() == {"a": 3.0, "b": 0.5}


def test_a_step_measures_what_its_consumer_does_between_two_microbatches(clock: list[float]) -> None:
    def microbatches() -> Any:
        for number in range(4):
            clock[0] += 100.0  # waits for data
            yield Microbatch(replica=number % 2, index=number // 2, data=None)  # type: ignore[arg-type]

    step = Step(index=0, num_samples=4, _microbatches=microbatches(), _tickets=[])
    for microbatch in step:
        clock[0] += 1.0 + microbatch.replica
    work = step.work()
    assert [(one.unit, one.replica, one.kind) for one in work] == [(ALL_UNITS, r, Kind.FORWARD) for r in (0, 1)]
    assert [(one.microbatches, one.seconds) for one in work] == [((0, 1), (1.0, 1.0)), ((0, 1), (2.0, 2.0))]


def test_what_a_pipeline_has_measured_counts_instead() -> None:
    measured = [MeasuredWork(unit="llm", replica=0, stage=0, kind=Kind.FORWARD, microbatches=(0,), seconds=(3.0,))]
    assert Step(index=0, num_samples=0, _microbatches=iter(()), _tickets=[], measured=measured).work() is measured


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_time_of_the_device_counts() -> None:
    watch = Stopwatch[str](on_gpu=True)
    matrix = torch.randn(8192, 8192, device="cuda")
    began_s = time.perf_counter()
    watch.start()
    for _ in range(20):
        matrix @ matrix
    watch.stop("a")
    launched_s = time.perf_counter() - began_s
    assert watch.seconds()["a"] > launched_s
