"""The stages in front of the store: which part is read next, which is decoded next, and how much is read ahead.

    waiting --read--> in memory --decode--> store

Reading waits for disks and servers, decoding for a core. Between them is a buffer of parts whose media are in memory, bounded in
number and in bytes, so that the decoding threads find work while the readers wait. Each stage first takes parts that a trainer
waits for, then those that are needed soonest.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.preprocessor.decoding import LoadedPart
from headrace.preprocessor.payload.part import Entry
from headrace.preprocessor.payload.priority import PriorityQueue


class StageQueue:
    """The parts that wait for one stage: those that a trainer waits for, and those to be prepared ahead."""

    def __init__(self, ready: Callable[[Entry], bool]) -> None:
        """`ready` tells whether a part waits for this stage, rather than for another one or for none."""
        self._awaited = PriorityQueue[Entry](_priority, lambda entry: ready(entry) and entry.num_fetches > 0)
        self._ahead = PriorityQueue[Entry](_priority, lambda entry: ready(entry) and not entry.expendable)

    def push(self, entry: Entry) -> None:
        """Add a part; call it whenever the part has become ready, awaited, or wanted again."""
        self._awaited.push(entry)
        self._ahead.push(entry)

    def awaited(self) -> Entry | None:
        """Return the most urgent part that a trainer waits for, leaving it in the queue; None if there is none."""
        return self._awaited.first()

    def ahead(self) -> Entry | None:
        """Return the most urgent part to prepare ahead, leaving it in the queue; None if there is none."""
        return self._ahead.first()

    def prune(self) -> None:
        """Drop parts that do not wait for this stage any more, such as released ones."""
        self._awaited.prune()
        self._ahead.prune()


class ReadAhead:
    """Bounds the parts that are being read, or read and not yet decoded, in number and in bytes. For one event loop.

    The bytes of a part count until it is decoded; a part that is being read counts as much as the largest recent ones. If there
    is no other, one part is read however large it is. A part that a trainer waits for is read without asking `has_room`.
    """

    def __init__(self, max_bytes: int, max_parts: int) -> None:
        self.max_bytes = max_bytes
        self.max_parts = max_parts
        self.held_bytes = 0
        self._reading: set[Entry] = set()
        self._read: set[Entry] = set()
        self._largest_bytes = max_bytes // max_parts

    def has_room(self) -> bool:
        """Whether one more part may be read ahead."""
        if len(self._reading) + len(self._read) >= self.max_parts:
            return False
        expected_bytes = (len(self._reading) + 1) * self._largest_bytes
        return self.held_bytes + expected_bytes <= self.max_bytes or not (self.held_bytes or self._reading)

    def needed_last(self) -> Entry | None:
        """Return the part in memory that is needed last and that nobody waits for; None if there is none."""
        return max((entry for entry in self._read if not entry.num_fetches), key=_priority, default=None)

    def begin_reading(self, entry: Entry) -> None:
        """Mark a part as being read."""
        entry.loading = True
        self._reading.add(entry)

    def put(self, entry: Entry, loaded: LoadedPart) -> None:
        """Take the samples of a part that has been read into memory."""
        self.end_reading(entry)
        entry.loaded = loaded
        self._read.add(entry)
        self.held_bytes += loaded.nbytes
        self._largest_bytes = max(int(self._largest_bytes * 0.9), loaded.nbytes)

    def end_reading(self, entry: Entry) -> None:
        """Mark a part as no longer being read, whether it was read or not."""
        entry.loading = False
        self._reading.discard(entry)

    def begin_decoding(self, entry: Entry) -> None:
        """Stop counting a part in the number of parts; its bytes still count until `drop`."""
        self._read.discard(entry)

    def drop(self, entry: Entry) -> None:
        """Drop the media of a part from memory."""
        if entry.loaded is not None:
            self.held_bytes -= entry.loaded.nbytes
            entry.loaded = None
        self._read.discard(entry)


def _priority(entry: Entry) -> int:
    return entry.priority
