"""The payload store: parts to decode and parts decoded, within a byte budget.

Only what a trainer waits for may exceed the budget. When it is full, decoding ahead pauses, parts that were fetched already
make room first, and then those that are needed last; an evicted part is decoded again when it is asked for. So no order of
requests can lead to a standstill, and memory never grows with the length of the window.

Parts lie in the arena, shared memory that trainers on this host read in place, or on the heap where it has no room. A part
that a trainer holds there counts in the budget and is not evicted; so no more than a share of the budget is lent at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pyarrow as pa

from headrace.quarantine import Rejected
from headrace.sample import SampleRef
from headrace.transport.base import checksum
from preprocessor.arena import Arena, Slot

LENT_SHARE = 0.5  # of the budget, for parts that trainers hold until their commit; the rest is for decoding ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A decoded part: an Arrow IPC stream, and the samples that turned out to be damaged."""

    data: pa.Buffer
    num_samples: int
    rejected: tuple[Rejected, ...]
    slot: Slot | None = None
    """Where in the arena it lies; None: on the heap."""
    crc32: int | None = None

    @property
    def is_damaged(self) -> bool:
        """Whether the bytes are not those that were written, as far as that can be told."""
        return self.crc32 is not None and self.crc32 != checksum(self.data)


class PayloadWriter:
    """Puts decoded parts into the arena, or onto the heap where there is none or it has no room. Thread-safe."""

    def __init__(self, arena: Arena | None = None, *, with_checksum: bool = False) -> None:
        self._arena = arena
        self._with_checksum = with_checksum

    def write(self, batch: pa.RecordBatch, rejected: tuple[Rejected, ...]) -> Payload:
        """The batch as an Arrow IPC stream. Its values are copied once, into place."""
        measured = pa.MockOutputStream()  # knows the size without a copy
        _write_stream(measured, batch)
        slot = self._arena.allocate(measured.size()) if self._arena is not None else None
        data = slot.buffer if slot is not None else pa.allocate_buffer(measured.size())
        with pa.FixedSizeBufferWriter(data) as sink:
            _write_stream(sink, batch)
        crc32 = checksum(data) if self._with_checksum else None
        return Payload(data=data, num_samples=batch.num_rows, rejected=rejected, slot=slot, crc32=crc32)


def _write_stream(sink: pa.NativeFile, batch: pa.RecordBatch) -> None:
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)


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
    """Evicted first, and not decoded ahead again."""
    delivered: bool = False
    """A trainer has had it since it was last taken."""
    lent: bool = False
    """A trainer was told its slot, and may hold it still."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    gone: bool = False


class PayloadStore:
    """See the module's text. For one event loop."""

    def __init__(self, budget_bytes: int, arena: Arena | None = None) -> None:
        self.budget_bytes = budget_bytes
        self._arena = arena
        self._payload_bytes = 0
        self._entries: dict[str, Entry] = {}
        self._work = asyncio.Event()
        self._largest_bytes = 1 << 20  # room set aside for each part being decoded; follows the largest ones of late

    @property
    def held_bytes(self) -> int:
        """Of decoded parts, those included that are released and that a trainer has not let go of yet."""
        return self._payload_bytes + (self._arena.lingering_bytes() if self._arena is not None else 0)

    def add(self, entry: Entry) -> Entry:
        """Take a part; one that is here already is kept, with its payload unless that is why it comes again: it is damaged."""
        entry = self._entries.setdefault(entry.ticket, entry)
        if entry.delivered and not entry.waiting and entry.payload is not None and entry.payload.is_damaged:
            self._drop(entry)
        entry.fetched = entry.delivered = False
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
            self._free(payload)
            return
        entry.payload = payload
        self._payload_bytes += payload.data.size
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
        """The payload once it is decoded, as it is until the block ends; None where the part is released meanwhile."""
        entry.waiting += 1
        self._work.set()
        try:
            while entry.payload is None and not entry.gone:
                entry.changed.clear()
                await entry.changed.wait()
            yield entry.payload
        finally:
            entry.waiting -= 1
            if entry.gone and not entry.waiting:
                self._drop(entry)
            self._trim()
            self._work.set()

    def mark_fetched(self, entry: Entry) -> None:
        """A trainer has it: it may be evicted first."""
        entry.fetched = entry.delivered = True
        self._work.set()

    def lend(self, entry: Entry) -> Slot | None:
        """The slot of a decoded part, for a trainer to hold; None where it is on the heap or enough is lent already."""
        if entry.payload is None or entry.payload.slot is None:
            return None
        limit = LENT_SHARE * self.budget_bytes - entry.payload.data.size
        others = [e for e in self._entries.values() if e.lent and e is not entry]
        if _payload_bytes(others) > limit:
            for other in others:
                other.lent = bool(other.waiting) or self._is_held(other)
            others = [other for other in others if other.lent]
        lingering_bytes = self._arena.lingering_bytes() if self._arena is not None else 0
        if _payload_bytes(others) + lingering_bytes > limit:
            return None
        entry.lent = True
        return entry.payload.slot

    def release(self, job: str, step: int | None = None) -> None:
        """Drop the parts of a job, or those of its steps up to `step`."""
        for entry in [e for e in self._entries.values() if e.job == job and (step is None or e.step <= step)]:
            del self._entries[entry.ticket]
            entry.gone = True
            if not entry.waiting:
                self._drop(entry)
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
        if self.held_bytes + num_bytes <= self.budget_bytes:
            return True
        for entry in self._evictable():
            if self.held_bytes + num_bytes <= self.budget_bytes:
                break
            if entry.fetched or entry.priority > before:
                self._drop(entry)
        # A store that holds nothing takes one part however large it is.
        return self.held_bytes + num_bytes <= self.budget_bytes or not (self.held_bytes or self._reserved_bytes())

    def _trim(self) -> None:
        """Go back to the budget after a part that was larger than foreseen, or awaited: evict what is needed last."""
        if self.held_bytes <= self.budget_bytes:
            return
        for entry in self._evictable():
            alone = entry.payload is not None and entry.payload.data.size == self.held_bytes
            if self.held_bytes <= self.budget_bytes or (alone and not entry.fetched):
                break
            self._drop(entry)

    def _evictable(self) -> list[Entry]:
        held = [entry for entry in self._entries.values() if entry.payload is not None and not entry.waiting]
        return sorted((e for e in held if not self._is_held(e)), key=lambda e: (not e.fetched, -e.priority))

    def _is_held(self, entry: Entry) -> bool:
        """Whether a trainer holds the part in the arena."""
        slot = entry.payload.slot if entry.lent and entry.payload is not None else None
        return slot is not None and self._arena is not None and self._arena.is_held(slot)

    def _drop(self, entry: Entry) -> None:
        if entry.payload is not None:
            self._payload_bytes -= entry.payload.data.size
            self._free(entry.payload)
            entry.payload = None
            entry.lent = False

    def _free(self, payload: Payload) -> None:
        if payload.slot is not None and self._arena is not None:
            self._arena.free(payload.slot)


def _payload_bytes(entries: list[Entry]) -> int:
    return sum(entry.payload.data.size for entry in entries if entry.payload is not None)
