"""Laps by key, and what a step measures of the loop over its microbatches."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from headrace.measured import ALL_UNITS, MeasuredWork
from headrace.schedule import Kind
from headrace.trainer.loading.steps import Microbatch, Step
from headrace.trainer.loading.stopwatch import Stopwatch, clock_origin_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that it is; assign to its only entry."""
    now = [0.0]
    monkeypatch.setattr("headrace.trainer.loading.stopwatch.time.monotonic", lambda: now[0])
    return now


def test_laps_have_their_key_and_times_on_the_hosts_clock(clock: list[float]) -> None:
    watch = Stopwatch[str](on_gpu=False)
    for began_s, ended_s, key in ((1.0, 2.0, "a"), (5.0, 5.5, "b"), (6.0, 8.0, "a")):
        clock[0] = began_s
        watch.start()
        clock[0] = ended_s
        watch.stop(key)
    watch.mark()
    assert watch.laps() == [("a", 1.0, 2.0), ("b", 5.0, 5.5), ("a", 6.0, 8.0)]
    assert Stopwatch[str](on_gpu=False).laps() == []


class DeviceEvent:
    """An event of a device that works off what it is given, on a clock of its own; `device` says what time it is."""

    device: list[float]

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.reached_s = self.device[0]

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: DeviceEvent) -> float:
        return (other.reached_s - self.reached_s) * 1e3


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_devices_times_are_put_onto_the_hosts_clock(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, is_marked: bool
) -> None:
    """The device is 1000 s behind in its clock, and does what it is asked for later: here 3 s, at the mark at once."""
    DeviceEvent.device = [0.0]
    monkeypatch.setattr(torch.cuda, "Event", DeviceEvent)
    watch = Stopwatch[str](on_gpu=True)

    def at(asked_s: float, reached_s: float) -> None:
        clock[0], DeviceEvent.device[0] = asked_s, reached_s - 1_000.0

    at(10.0, 13.0)
    watch.start()
    at(10.1, 15.0)
    watch.stop("a")
    if is_marked:
        at(20.0, 20.0)
        watch.mark()
    early_s = 0.0 if is_marked else 3.0  # the device waited for the host at none: as early as can be is too early by that
    [lap] = watch.laps()
    assert lap.key == "a"
    assert (lap.begin_s, lap.end_s) == pytest.approx((13.0 - early_s, 15.0 - early_s))


def test_the_clock_with_the_least_interrupted_reading_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monotonic = iter([0.0, 9.0, 10.0, 10.5, 20.0, 29.0, 30.0, 39.0, 40.0, 49.0])
    unix = iter([105.0, 1_010.25, 125.0, 135.0, 145.0])
    monkeypatch.setattr("headrace.trainer.loading.stopwatch.time.monotonic", lambda: next(monotonic))
    monkeypatch.setattr("headrace.trainer.loading.stopwatch.time.time", lambda: next(unix))
    assert clock_origin_s() == 1_000.0


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
    assert [(one.chunks, one.begins_s) for one in work] == [((), (0.0, 203.0)), ((), (0.0, 203.0))]
    assert work[1].origin_unix_s - work[0].origin_unix_s == pytest.approx(101.0, abs=1e-3)


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
    [lap] = watch.laps()
    assert lap.end_s - lap.begin_s > launched_s


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_behind_a_mark_a_gpus_times_lie_within_the_hosts() -> None:
    watch = Stopwatch[str](on_gpu=True)
    matrix = torch.randn(8192, 8192, device="cuda")
    for _ in range(100):
        matrix @ matrix  # what the lap waits for
    began_s = time.monotonic()
    watch.start()
    for _ in range(20):
        product = matrix @ matrix
    watch.stop("a")
    launched_s = time.monotonic()
    float(product.sum())
    read_s = time.monotonic()
    watch.mark()
    [lap] = watch.laps()
    assert began_s < lap.begin_s
    assert launched_s < lap.end_s < read_s
