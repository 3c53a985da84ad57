"""A cache of what probing has read, for decoding: if both happen in one process, nothing is read or tokenised twice."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

from headrace.sample import SampleRef

_ENTRY_BYTES = 1024  # approximate overhead of an entry beside its value

_Value = TypeVar("_Value")


class ProbeCache(Generic[_Value]):
    """A cache with one value per sample of a job, bounded in bytes, which drops the oldest values first. Thread-safe."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._held_bytes = 0
        self._values: OrderedDict[tuple[str, int, int], tuple[_Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, job: str, ref: SampleRef, value: _Value, num_bytes: int) -> None:
        """Keep a value of `num_bytes` for a sample; the oldest values make room for it."""
        with self._lock:
            key = job, ref.shard, ref.row
            self._take(key)
            self._values[key] = value, num_bytes + _ENTRY_BYTES
            self._held_bytes += num_bytes + _ENTRY_BYTES
            while self._held_bytes > self._budget_bytes:
                self._take(next(iter(self._values)))

    def take(self, job: str, ref: SampleRef) -> _Value | None:
        """Remove and return the value of a sample; None if there is none."""
        with self._lock:
            return self._take((job, ref.shard, ref.row))

    def has(self, job: str, ref: SampleRef) -> bool:
        """Whether there is a value of a sample."""
        with self._lock:
            return (job, ref.shard, ref.row) in self._values

    def forget(self, job: str) -> None:
        """Drop all values of a job that is over or has other shards."""
        with self._lock:
            for key in [key for key in self._values if key[0] == job]:
                self._take(key)

    def _take(self, key: tuple[str, int, int]) -> _Value | None:
        value, num_bytes = self._values.pop(key, (None, 0))
        self._held_bytes -= num_bytes
        return value
