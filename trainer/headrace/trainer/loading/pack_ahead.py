"""Packing one microbatch, or one portion of a microbatch, ahead of the consumer, as soon as its parts have come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from headrace.trainer.rank_progress import PROGRESS

_What = TypeVar("_What")
_Packed = TypeVar("_Packed")


class PackAhead(Generic[_What, _Packed]):
    """Packs the announced item ahead in a thread of its own, and any other item when it is taken. Thread-safe."""

    def __init__(self, pack: Callable[[_What], _Packed], is_ready: Callable[[_What], bool]) -> None:
        """`pack(item)`: waits for the item's parts and packs them. `is_ready(item)`: whether `pack` would not have to wait."""
        self._pack = pack
        self._is_ready = is_ready
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="pack")
        self._lock = threading.Lock()  # guards both below
        self._announced: _What | None = None
        self._ahead: tuple[_What, Future[_Packed]] | None = None

    def announce(self, what: _What) -> None:
        """Announce the item that is taken next."""
        with self._lock:
            self._announced, self._ahead = what, None
        self.start_if_ready()

    def start_if_ready(self) -> None:
        """Start packing the announced item if its parts are there. To be called whenever a part has come."""
        with self._lock:
            if self._announced is not None and self._is_ready(self._announced):
                self._ahead = self._announced, self._pool.submit(self._pack, self._announced)
                self._announced = None

    def take(self, what: _What) -> _Packed:
        """Return `what` packed. Raises what `pack` raises."""
        with self._lock:
            ahead, self._announced, self._ahead = self._ahead, None, None
        with PROGRESS.excused("waits for data"):
            return ahead[1].result() if ahead is not None and ahead[0] == what else self._pack(what)

    def close(self) -> None:
        """Start packing no further items; one being packed is finished."""
        with self._lock:
            self._announced = None
        self._pool.shutdown(wait=False)
