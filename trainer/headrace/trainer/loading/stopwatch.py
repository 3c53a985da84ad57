"""A stopwatch for computations: on a GPU it measures the device's time, and does not stop the device for that."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)

_CLOCK_READINGS = 5


class Lap(NamedTuple, Generic[Key]):
    """A span of time of something, as readings of `time.monotonic`, the clock that all processes of a host share."""

    key: Key
    begin_s: float
    end_s: float


class _Mark(NamedTuple):
    """A point in the work of a device, and when the host asked for it."""

    asked_s: float
    event: torch.cuda.Event | None


class Stopwatch(Generic[Key]):
    """Takes the laps between `start` and `stop`, by key.

    They are the host's, or with `on_gpu` those in which the current stream of the current GPU got there. A GPU's events only know
    the time between each other. They are put onto the host's clock as early as none of them comes before the host asked for it:
    exactly, where the device has waited for the host at one of them. `mark` is for a point of which this is known.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._began = _Mark(0.0, None)
        self._laps: list[tuple[Key, _Mark, _Mark]] = []
        self._marks: list[_Mark] = []

    def start(self) -> None:
        """Begin a lap."""
        self._began = self._now()

    def stop(self, key: Key) -> None:
        """End the lap."""
        self._laps.append((key, self._began, self._now()))

    def mark(self) -> None:
        """Note a point where the device has nothing left to do, as behind a value that the host has read from it."""
        if self._on_gpu:
            self._marks.append(self._now())

    def laps(self) -> list[Lap[Key]]:
        """Return all laps, in the order in which they ended. On a GPU this waits for the end of the last one."""
        if not self._laps:
            return []
        ends = [mark for _, began, ended in self._laps for mark in (began, ended)] + self._marks
        origin = ends[0]
        if ends[-1].event is not None:
            ends[-1].event.synchronize()
        origin_s = max(mark.asked_s - _between_s(origin, mark) for mark in ends)
        return [
            Lap(key, origin_s + _between_s(origin, began), origin_s + _between_s(origin, ended))
            for key, began, ended in self._laps
        ]

    def _now(self) -> _Mark:
        asked_s = time.monotonic()
        if not self._on_gpu:
            return _Mark(asked_s, None)
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return _Mark(asked_s, event)


def _between_s(began: _Mark, ended: _Mark) -> float:
    """Return the seconds between two points: of the device where it was asked for them."""
    if began.event is None or ended.event is None:
        return ended.asked_s - began.asked_s
    return float(began.event.elapsed_time(ended.event)) / 1e3


def uses_gpu() -> bool:
    """Return whether this process computes on a GPU."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def clock_origin_s() -> float:
    """Return the Unix time at 0 of this host's `time.monotonic`, from the shortest of several readings of both clocks."""
    readings = []
    for _ in range(_CLOCK_READINGS):
        before_s, unix_s, after_s = time.monotonic(), time.time(), time.monotonic()
        readings.append((after_s - before_s, unix_s - (before_s + after_s) / 2))
    return min(readings)[1]
