"""A stopwatch for computations: on a GPU it measures the device's time, and does not stop the device for that."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Generic, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)


class Stopwatch(Generic[Key]):
    """Adds up the seconds between `start` and `stop`, by key.

    The seconds are the host's, or with `on_gpu` those in which the current stream of the current GPU got there.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._began: float | torch.cuda.Event = 0.0
        self._laps: list[tuple[Key, float | torch.cuda.Event, float | torch.cuda.Event]] = []

    def start(self) -> None:
        """Begin a lap."""
        self._began = self._now()

    def stop(self, key: Key) -> None:
        """End the lap, whose seconds are added to those of `key`."""
        self._laps.append((key, self._began, self._now()))

    def seconds(self) -> dict[Key, float]:
        """Return the seconds of every key. On a GPU this waits for the end of the last lap."""
        sums: dict[Key, float] = {}
        for key, began, ended in self._laps:
            sums[key] = sums.get(key, 0.0) + _between_s(began, ended)
        return sums

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _between_s(began: float | torch.cuda.Event, ended: float | torch.cuda.Event) -> float:
    if isinstance(began, float) and isinstance(ended, float):
        return ended - began
    assert isinstance(began, torch.cuda.Event)
    assert isinstance(ended, torch.cuda.Event)
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3
