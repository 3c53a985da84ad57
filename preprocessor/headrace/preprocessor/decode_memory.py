"""One budget of memory for all media that this process decodes at a time, whatever the number of its threads.

What decoding a medium would hold is known from its header (image.decode_cost, preprocessor.audio). A spec bounds it for
each; but a dozen threads at that bound are more than a container has, and the kernel would end the process. So who decodes
waits until there is room. Nothing is refused for want of it: what is larger than the whole budget is decoded alone.

A process decodes without a bound until it says one, with `decoding_within`.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator


class DecodeMemory:
    """Bytes that threads take and give back. Thread-safe."""

    def __init__(self, most: float) -> None:
        """`most`: bytes that may be taken at a time."""
        self._most = most
        self._free = most
        self._next = threading.Lock()
        self._given_back = threading.Condition()

    @contextlib.contextmanager
    def room_for(self, num_bytes: int) -> Iterator[None]:
        """So many bytes during the block, or all there are where it is more. Waits for them; a thread may not take twice."""
        taken = min(num_bytes, self._most)
        with (
            self._next,
            self._given_back,
        ):  # one thread waits for room, the others for their turn: small media overtake no large one
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
    """Decode something that holds so many bytes, during the block, once there is room in this process."""
    return _memory.room_for(num_bytes)


@contextlib.contextmanager
def decoding_within(num_bytes: int) -> Iterator[None]:
    """This process, with all of its threads, decodes in so much memory during the block."""
    global _memory
    before, _memory = _memory, DecodeMemory(num_bytes)
    try:
        yield
    finally:
        _memory = before
