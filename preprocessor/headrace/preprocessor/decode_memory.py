"""One memory budget for all media that this process decodes at a time, whatever the number of its threads.

The memory that decoding a medium takes is known from its header (image.decode_cost, preprocessor.audio). A spec bounds it per
medium, but a dozen threads at that bound exceed a container's memory, and the kernel would kill the process. So a thread waits
for room before it decodes. Nothing is refused for lack of room: a medium larger than the whole budget is decoded alone.

There is no bound until `decoding_within` sets one.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator


class DecodeMemory:
    """A budget of bytes that threads reserve and give back. Thread-safe."""

    def __init__(self, most: float) -> None:
        """`most` is the number of bytes that may be reserved at a time, by all threads together."""
        self._most = most
        self._free = most
        self._next = threading.Lock()
        self._given_back = threading.Condition()

    @contextlib.contextmanager
    def room_for(self, num_bytes: int) -> Iterator[None]:
        """Wait for and reserve `num_bytes`, at most the whole budget, during the block. A thread may not nest reservations."""
        taken = min(num_bytes, self._most)
        with (
            self._next,
            self._given_back,
        ):  # one thread waits for room, the others for their turn, so that small media do not overtake a large one
            self._given_back.wait_for(lambda: self._free >= taken)
            self._free -= taken
        try:
            yield
        finally:
            with self._given_back:
                self._free += taken
                self._given_back.notify()


_memory = DecodeMemory(math.inf)


def room_for(num_bytes: int) -> contextlib.AbstractContextManager[None]:
    """Reserve `num_bytes` of this process's decoding memory during the block, after waiting until there is room."""
    return _memory.room_for(num_bytes)


@contextlib.contextmanager
def decoding_within(num_bytes: int) -> Iterator[None]:
    """Bound the decoding memory of this process, all threads together, to `num_bytes` during the block."""
    global _memory
    before, _memory = _memory, DecodeMemory(num_bytes)
    try:
        yield
    finally:
        _memory = before
