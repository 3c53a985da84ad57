"""The stages in front of the store: which part is read next, which is decoded next, and how much is read ahead.

    waiting --read--> in memory --decode--> store

Reading waits for disks and servers, decoding for a core. Between them lie parts whose media are in memory, bounded in number
and in bytes, so that the decoding threads find work while the readers wait. Each stage takes what a trainer waits for before
all else, then what is needed soonest.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.preprocessor.decoding import LoadedPart
from headrace.preprocessor.payload.part import Entry
from headrace.preprocessor.payload.priority import PriorityQueue


class StageQueue:
    """Parts that wait for a stage."""

    def __init__(self, ready: Callable[[Entry], bool]) -> None:
        """`ready`: whether a part waits for this stage, and not for another one or for none."""
        self._awaited = PriorityQueue[Entry](_priority, lambda entry: ready(entry) and entry.waiting > 0)
        self._ahead = PriorityQueue[Entry](_priority, lambda entry: ready(entry) and not entry.fetched)

    def push(self, entry: Entry) -> None:
        """To be called whenever the part has become ready, awaited, or wanted again."""
        self._awaited.push(entry)
        self._ahead.push(entry)

    def awaited(self) -> Entry | None:
        """The first of those that a trainer waits for."""
        return self._awaited.first()

    def ahead(self) -> Entry | None:
        """The first of those that a trainer will need."""
        return self._ahead.first()

    def prune(self) -> None:
        """Forget parts that are gone."""
        self._awaited.prune()
        self._ahead.prune()


class ReadAhead:
    """Parts that are being read, or read and not decoded yet. For one event loop.

    The bytes of a part count until it is decoded, and those of one that is being read as if it were one of the largest of
    late. One part is read however large it is; and so is one that a trainer waits for, which `has_room` is not asked for.
    """

    def __init__(self, max_bytes: int, max_parts: int) -> None:
        self.max_bytes = max_bytes
        self.max_parts = max_parts
        self.held_bytes = 0
        self._reading: set[Entry] = set()
        self._read: set[Entry] = set()
        self._largest_bytes = max_bytes // max_parts

    def has_room(self) -> bool:
        """For one more part."""
        if len(self._reading) + len(self._read) >= self.max_parts:
            return False
        expected_bytes = (len(self._reading) + 1) * self._largest_bytes
        return self.held_bytes + expected_bytes <= self.max_bytes or not (self.held_bytes or self._reading)

    def latest(self) -> Entry | None:
        """The part in memory that is needed last, and that nobody waits for."""
        return max((entry for entry in self._read if not entry.waiting), key=_priority, default=None)

    def begin(self, entry: Entry) -> None:
        """The part is being read."""
        entry.loading = True
        self._reading.add(entry)

    def put(self, entry: Entry, loaded: LoadedPart) -> None:
        """The part is in memory."""
        self.fail(entry)
        entry.loaded = loaded
        self._read.add(entry)
        self.held_bytes += loaded.nbytes
        self._largest_bytes = max(int(self._largest_bytes * 0.9), loaded.nbytes)

    def fail(self, entry: Entry) -> None:
        """The part is not being read any more."""
        entry.loading = False
        self._reading.discard(entry)

    def begin_decoding(self, entry: Entry) -> None:
        """The part makes place for another one; its bytes still count."""
        self._read.discard(entry)

    def drop(self, entry: Entry) -> None:
        """The media are of no use any more."""
        if entry.loaded is not None:
            self.held_bytes -= entry.loaded.nbytes
            entry.loaded = None
        self._read.discard(entry)


def _priority(entry: Entry) -> int:
    return entry.priority
