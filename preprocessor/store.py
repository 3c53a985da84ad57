"""The payload store: parts to decode and parts decoded, within a byte budget.

Only what a trainer waits for may exceed the budget. When it is full, decoding ahead pauses, parts that were fetched already
make room first, and then those that are needed last; an evicted part is decoded again when it is asked for. So no order of
requests can lead to a standstill, and memory never grows with the length of the window.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pyarrow as pa

from headrace.quarantine import Rejected
from headrace.sample import SampleRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A decoded part: an Arrow IPC stream, and the samples that turned out to be damaged."""

    data: pa.Buffer
    num_samples: int
    rejected: tuple[Rejected, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """A part that this preprocessor has a lease on. `priority`: the lower, the sooner a trainer needs it."""

    ticket: str
    job: str
    step: int
    priority: int
    refs: tuple[SampleRef, ...]
    payload: Payload | None = None
    decoding: bool = False
    waiting: int = 0
    """Fetches that wait for it or read it now."""
    fetched: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    gone: bool = False


class PayloadStore:
    """See the module's text. For one event loop."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.held_bytes = 0
        self._entries: dict[str, Entry] = {}
        self._work = asyncio.Event()
        self._largest_bytes = 1 << 20  # room set aside for each part being decoded; follows the largest ones of late

    def add(self, entry: Entry) -> Entry:
        """Take a part; one that is here already is kept, with its payload."""
        entry = self._entries.setdefault(entry.ticket, entry)
        entry.fetched = False
        self._work.set()
        return entry

    def get(self, ticket: str) -> Entry | None:
        return self._entries.get(ticket)

    async def take(self) -> Entry:
        """The part to decode now, marked as being decoded, as soon as there is one and room for it."""
        while (entry := self.next_to_decode()) is None:
            self._work.clear()
            await self._work.wait()
        return entry

    def next_to_decode(self) -> Entry | None:
        """As `take`, without waiting: None where there is no part, or no room."""
        pending = [
            entry for entry in self._entries.values() if entry.payload is None and not entry.decoding and not entry.fetched
        ]
        awaited = [entry for entry in self._entries.values() if entry.payload is None and not entry.decoding and entry.waiting]
        if awaited:
            entry = min(awaited, key=lambda e: e.priority)
        elif pending:
            entry = min(pending, key=lambda e: e.priority)
            if not self._make_room(self._reserved_bytes() + self._largest_bytes, before=entry.priority):
                return None
        else:
            return None
        entry.decoding = True
        return entry

    def fill(self, entry: Entry, payload: Payload) -> None:
        """Take the decoded payload and wake who waits for it."""
        entry.decoding = False
        if entry.gone:
            return
        entry.payload = payload
        self.held_bytes += payload.data.size
        self._largest_bytes = max(int(self._largest_bytes * 0.9), payload.data.size)
        entry.changed.set()
        self._trim()
        self._work.set()

    def abandon(self, entry: Entry) -> None:
        """The part could not be decoded: drop it, and tell who waits for it."""
        if not entry.gone:
            del self._entries[entry.ticket]
            entry.gone = True
        entry.changed.set()
        self._work.set()

    @contextlib.asynccontextmanager
    async def held(self, entry: Entry) -> AsyncIterator[Payload | None]:
        """The payload once it is decoded, not evicted during the block; None where the part is released meanwhile."""
        entry.waiting += 1
        self._work.set()
        try:
            while entry.payload is None and not entry.gone:
                entry.changed.clear()
                await entry.changed.wait()
            yield entry.payload
        finally:
            entry.waiting -= 1
            self._trim()
            self._work.set()

    def mark_fetched(self, entry: Entry) -> None:
        """A trainer has it: it may be evicted first."""
        entry.fetched = True
        self._work.set()

    def release(self, job: str, step: int | None = None) -> None:
        """Drop the parts of a job, or those of its steps up to `step`."""
        for entry in [e for e in self._entries.values() if e.job == job and (step is None or e.step <= step)]:
            del self._entries[entry.ticket]
            self._drop(entry)
            entry.gone = True
            entry.changed.set()
        self._work.set()

    def release_all_on_demand(self) -> None:
        """Leases are void (the connection broke): keep what is decoded as long as there is room, decode nothing more ahead."""
        for entry in self._entries.values():
            entry.fetched = True

    def _reserved_bytes(self) -> int:
        return self._largest_bytes * sum(entry.decoding for entry in self._entries.values())

    def _make_room(self, num_bytes: int, *, before: int) -> bool:
        """Evict until `num_bytes` more fit: fetched parts, then those needed later than priority `before`, last first."""
        for entry in self._evictable():
            if self.held_bytes + num_bytes <= self.budget_bytes:
                break
            if entry.fetched or entry.priority > before:
                self._drop(entry)
        # A store that holds nothing takes one part however large it is.
        return self.held_bytes + num_bytes <= self.budget_bytes or not (self.held_bytes or self._reserved_bytes())

    def _trim(self) -> None:
        """Go back to the budget after a part that was larger than foreseen, or awaited: evict what is needed last."""
        for entry in self._evictable():
            alone = entry.payload is not None and entry.payload.data.size == self.held_bytes
            if self.held_bytes <= self.budget_bytes or (alone and not entry.fetched):
                break
            self._drop(entry)

    def _evictable(self) -> list[Entry]:
        held = [entry for entry in self._entries.values() if entry.payload is not None and not entry.waiting]
        return sorted(held, key=lambda e: (not e.fetched, -e.priority))

    def _drop(self, entry: Entry) -> None:
        if entry.payload is not None:
            self.held_bytes -= entry.payload.data.size
            entry.payload = None
