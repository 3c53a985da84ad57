"""What probing came by, kept until decoding: where both happen in one place, nothing is read or tokenised twice."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

from headrace.sample import SampleRef

_ENTRY_BYTES = 1024  # of an entry beside its value, about

_Value = TypeVar("_Value")


class Probed(Generic[_Value]):
    """A value for each sample of some jobs, put and not yet taken: the latest of them, within a budget. Thread-safe."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._held_bytes = 0
        self._values: OrderedDict[tuple[str, int, int], tuple[_Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, job: str, ref: SampleRef, value: _Value, num_bytes: int) -> None:
        """Keep a value of that size; the oldest of others make room."""
        with self._lock:
            key = job, ref.shard, ref.row
            self._take(key)
            self._values[key] = value, num_bytes + _ENTRY_BYTES
            self._held_bytes += num_bytes + _ENTRY_BYTES
            while self._held_bytes > self._budget_bytes:
                self._take(next(iter(self._values)))

    def take(self, job: str, ref: SampleRef) -> _Value | None:
        """A sample's value, which is not kept any longer; None where there is none."""
        with self._lock:
            return self._take((job, ref.shard, ref.row))

    def forget(self, job: str) -> None:
        """A job is over, or has other shards."""
        with self._lock:
            for key in [key for key in self._values if key[0] == job]:
                self._take(key)

    def _take(self, key: tuple[str, int, int]) -> _Value | None:
        value, num_bytes = self._values.pop(key, (None, 0))
        self._held_bytes -= num_bytes
        return value
