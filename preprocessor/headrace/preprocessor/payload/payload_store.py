"""The payload store: parts to read, to decode and decoded, within a byte budget.

Only parts that a trainer waits for may exceed the budget. When it is full, reading and decoding ahead pause, and parts are
evicted: first those already fetched, then those needed last. An evicted part is decoded again when it is asked for. So no order
of requests can lead to a deadlock, and memory never grows with the length of the window.

Parts lie in the arena, shared memory that trainers on this host read in place, or on the heap where the arena has no room. A
part that a trainer holds in the arena counts in the budget and is not evicted, so only a share of the budget is lent at a time.

Choosing the next part never searches through all parts: it takes a few comparisons, whether ten parts are held or ten thousand.
Releasing does search.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable

from headrace.observability import metrics
from headrace.preprocessor.decoding import LoadedPart
from headrace.preprocessor.payload.arena import Arena, Slot
from headrace.preprocessor.payload.part import Entry, PartStage, Payload
from headrace.preprocessor.payload.priority import PriorityQueue
from headrace.preprocessor.payload.staging import ReadAhead, StageQueue

LENT_SHARE = 0.5  # share of the budget for parts that trainers hold until their commit; the rest is for decoding ahead
_MAX_HOLD_CHECKS = 8  # parts that one call checks for whether a trainer still holds them; the next call checks others


class PayloadStore:
    """All parts of a preprocessor, from their order to their release, within a byte budget. For one event loop."""

    def __init__(self, budget_bytes: int, arena: Arena | None = None, read_ahead: ReadAhead | None = None) -> None:
        """`read_ahead` is the stage in front of decoding, whose bytes are a share of the budget; None: parts need no reading."""
        self.budget_bytes = budget_bytes
        self._arena = arena
        self._read_ahead = read_ahead
        self._entries: dict[str, Entry] = {}
        self._to_read = StageQueue(lambda entry: entry.stage is PartStage.WAITING and not entry.gone)
        self._to_decode = StageQueue(self._is_decodable)
        self._decoding: set[Entry] = set()
        self._payload_bytes = 0
        self._spent: dict[Entry, None] = {}  # decoded and fetched, in the order in which they were last found in use
        self._decoded = PriorityQueue[Entry](
            lambda entry: -entry.priority, lambda entry: entry.payload is not None and not (entry.expendable or entry.gone)
        )
        self._lent: dict[Entry, int] = {}  # bytes of parts whose slot a trainer was told and may still hold
        self._lent_bytes = 0
        self._largest_bytes = 1 << 20  # room set aside for each part being decoded; follows the largest recent ones
        self._work = asyncio.Event()
        self._taking = {PartStage.READ: asyncio.Lock(), PartStage.DECODE: asyncio.Lock()}  # one waiter a stage is woken, not all

    @property
    def held_bytes(self) -> int:
        """Bytes of decoded parts, including released ones that a trainer still holds."""
        return self._payload_bytes + self._lingering_bytes()

    @property
    def lent_bytes(self) -> int:
        """Bytes of parts whose slots trainers were told, and that have not been found free since."""
        return self._lent_bytes

    @property
    def stage_bytes(self) -> dict[PartStage, int]:
        """Bytes at each stage; a part being decoded counts with the room set aside for it. Readable from any thread."""
        read = self._read_ahead.held_bytes if self._read_ahead is not None else 0
        return {PartStage.READ: read, PartStage.DECODE: self._reserved_bytes(), PartStage.STORE: self.held_bytes}

    @property
    def stage_parts(self) -> Counter[PartStage]:
        """Number of parts at each stage. Readable from any thread."""
        return Counter(stage for entry in list(self._entries.values()) if (stage := entry.stage) is not None)

    def add(self, entry: Entry) -> Entry:
        """Add a part that was ordered, or find it here already; return the part in the store.

        A part already here keeps its payload, unless a trainer has fetched it and it is damaged: then it is decoded again. If it
        has another `left_out` or `strict`, the new part replaces it.
        """
        held = self._entries.get(entry.ticket)
        if held is not None and (held.left_out.keys(), held.strict) != (entry.left_out.keys(), entry.strict):
            self.remove(held)
        entry = self._entries.setdefault(entry.ticket, entry)
        if entry.delivered and not entry.num_fetches and entry.payload is not None and entry.payload.is_damaged:
            metrics.PARTS_DAMAGED.inc()
            self._drop(entry)
        entry.expendable = entry.delivered = False
        self._enqueue(entry)
        return entry

    def get(self, ticket: str) -> Entry | None:
        return self._entries.get(ticket)

    async def take_to_read(self) -> Entry:
        """Wait until there is a part to read and room for it; mark it as being read and return it."""
        return await self._taken(PartStage.READ, self.next_to_read)

    async def take_to_decode(self) -> Entry:
        """Wait until there is a part to decode and room for it; mark it as being decoded and return it."""
        return await self._taken(PartStage.DECODE, self.next_to_decode)

    async def _taken(self, stage: PartStage, take: Callable[[], Entry | None]) -> Entry:
        async with self._taking[stage]:
            while (entry := take()) is None:
                self._work.clear()
                await self._work.wait()
        return entry

    def next_to_read(self) -> Entry | None:
        """Return the part to read now, marked as being read; None if there is no part or no room."""
        if self._read_ahead is None:
            return None
        entry = self._to_read.awaited()
        if entry is None:
            entry = self._to_read.ahead()
            if entry is None or not self._may_read(entry, self._read_ahead):
                return None
        self._read_ahead.begin_reading(entry)
        return entry

    def next_to_decode(self) -> Entry | None:
        """Return the part to decode now, marked as being decoded; None if there is no part or no room."""
        entry = self._to_decode.awaited()
        if entry is None:
            entry = self._to_decode.ahead()
            if entry is None or not self._make_room(self._largest_bytes, before=entry.priority):
                return None
        entry.decoding = True
        self._decoding.add(entry)
        if self._read_ahead is not None:
            self._read_ahead.begin_decoding(entry)
            self._work.set()  # now another part may be read
        return entry

    def put_loaded(self, entry: Entry, loaded: LoadedPart) -> None:
        """Take the samples of a part that has been read, and queue it for decoding; drop them if the part was released."""
        assert self._read_ahead is not None
        if entry.gone:
            self._read_ahead.end_reading(entry)
        else:
            self._read_ahead.put(entry, loaded)
            self._drop_unwanted_media(entry)
            self._enqueue(entry)
        self._trim()

    def put_payload(self, entry: Entry, payload: Payload) -> None:
        """Take the payload of a part that has been decoded, and wake the fetches that wait for it."""
        self._end_work(entry)
        if entry.gone:
            self._free(payload)
            self._work.set()
            return
        if entry.evicted:
            metrics.PARTS_DECODED_AGAIN.inc()
        entry.payload = payload
        self._payload_bytes += payload.data.size
        self._largest_bytes = max(int(self._largest_bytes * 0.9), payload.data.size)
        entry.changed.set()
        self._enqueue(entry)
        self._trim()

    def abandon(self, entry: Entry) -> None:
        """Drop a part that could not be read or decoded, and wake the fetches that wait for it."""
        self._end_work(entry)
        if not entry.gone:
            del self._entries[entry.ticket]
            entry.gone = True
        entry.changed.set()
        self._work.set()

    @contextlib.asynccontextmanager
    async def held(self, entry: Entry) -> AsyncIterator[Payload | None]:
        """Wait for a part's payload, yield it and keep it until the block ends; yield None if the part is dropped before."""
        entry.num_fetches += 1
        self._enqueue(entry)
        try:
            while entry.payload is None and not entry.gone:
                entry.changed.clear()
                await entry.changed.wait()
            yield entry.payload
        finally:
            entry.num_fetches -= 1
            if entry.gone and not entry.num_fetches:
                self._drop(entry)
            self._drop_unwanted_media(entry)
            self._trim()
            self._work.set()

    def mark_fetched(self, entry: Entry) -> None:
        """Record that a trainer has fetched a part, which may now be evicted first."""
        entry.expendable = entry.delivered = True
        self._enqueue(entry)

    def lend(self, entry: Entry) -> Slot | None:
        """Lend a decoded part's slot to a trainer and return it; None if the part is on the heap or enough is lent already."""
        if entry.payload is None or entry.payload.slot is None:
            return None
        limit = LENT_SHARE * self.budget_bytes - entry.payload.data.size + self._lent.get(entry, 0)
        if self._lent_bytes > limit:
            for other in list(itertools.islice(self._lent, _MAX_HOLD_CHECKS)):
                busy = other is entry or self._is_busy(other)
                num_bytes = self._take_back(other)
                if busy:
                    self._lend(other, num_bytes)
        if self._lent_bytes + self._lingering_bytes() > limit:
            return None
        self._take_back(entry)
        self._lend(entry, entry.payload.data.size)
        return entry.payload.slot

    def release(self, job: str, step: int | None = None) -> None:
        """Drop all parts of a job, or only those of its steps up to and including `step`."""
        for entry in [e for e in self._entries.values() if e.job == job and (step is None or e.step <= step)]:
            self._remove(entry)
        for queue in (self._to_read, self._to_decode, self._decoded):
            queue.prune()
        self._work.set()

    def remove(self, entry: Entry) -> None:
        """Drop one part; fetches that wait for it are told that it is gone."""
        self._remove(entry)
        self._work.set()

    def void_leases(self) -> None:
        """Void all leases, since the connection broke: keep decoded parts while there is room, and decode nothing more ahead."""
        for entry in self._entries.values():
            entry.expendable, entry.lease = True, ""
            self._drop_unwanted_media(entry)
            self._enqueue(entry)

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.ticket]
        entry.gone = True
        self._drop_unwanted_media(entry)
        if not entry.num_fetches:
            self._drop(entry)
        entry.changed.set()

    def _enqueue(self, entry: Entry) -> None:
        """Put a part into the queue for its next stage or, once it is decoded, for eviction."""
        self._spent.pop(entry, None)
        if entry.payload is None:
            self._to_read.push(entry)
            self._to_decode.push(entry)
        elif entry.expendable:
            self._spent[entry] = None
        else:
            self._decoded.push(entry)
        self._work.set()

    def _is_decodable(self, entry: Entry) -> bool:
        if entry.gone or entry.decoding or entry.payload is not None:
            return False
        return self._read_ahead is None or entry.loaded is not None

    def _end_work(self, entry: Entry) -> None:
        """Mark a part as no longer being read or decoded, and drop its media."""
        entry.decoding = False
        self._decoding.discard(entry)
        if self._read_ahead is not None:
            self._read_ahead.end_reading(entry)
            self._read_ahead.drop(entry)

    def _drop_unwanted_media(self, entry: Entry) -> None:
        """Drop the media of a part that is neither awaited nor wanted ahead, as they would stay in memory for good."""
        if self._read_ahead is not None and (entry.gone or entry.expendable) and not (entry.num_fetches or entry.decoding):
            self._read_ahead.drop(entry)

    def _may_read(self, entry: Entry, read_ahead: ReadAhead) -> bool:
        """Whether `entry` may be read ahead now; drops the media of parts needed later to make room for it."""
        while not read_ahead.has_room():
            last = read_ahead.needed_last()
            if last is None or last.priority <= entry.priority:
                return False
            read_ahead.drop(last)
            self._enqueue(last)
        return True

    def _lingering_bytes(self) -> int:
        return self._arena.lingering_bytes() if self._arena is not None else 0

    def _reserved_bytes(self) -> int:
        return self._largest_bytes * len(self._decoding)

    def _fits(self, num_bytes: int) -> bool:
        for_reading = self._read_ahead.max_bytes if self._read_ahead is not None else 0
        return self.held_bytes + num_bytes <= self.budget_bytes - for_reading

    def _make_room(self, num_bytes: int, *, before: int) -> bool:
        """Evict until `num_bytes` more fit: fetched parts, then those needed later than priority `before`, last first.

        Return whether a part of that size may be taken.
        """
        num_bytes += self._reserved_bytes()
        self._evict(lambda: self._fits(num_bytes), lambda entry: entry.priority > before)
        # A store that holds nothing takes one part however large it is.
        return self._fits(num_bytes) or not (self.held_bytes or self._decoding)

    def _trim(self) -> None:
        """Evict what is needed last to get back into the budget, after a part was awaited or larger than foreseen."""
        self._evict(lambda: self._fits(0), lambda entry: _size(entry) < self.held_bytes)

    def _evict(self, enough: Callable[[], bool], may_go: Callable[[Entry], bool]) -> None:
        """Evict until `enough()`: first fetched parts, then others for which `may_go` is true, those needed last first."""
        in_use = 0
        while self._spent and in_use < min(_MAX_HOLD_CHECKS, len(self._spent)) and not enough():
            entry = next(iter(self._spent))
            if self._is_busy(entry):
                self._spent[entry] = self._spent.pop(entry)
                in_use += 1
            else:
                self._drop(entry, evicted=True)
        kept = []
        while not enough() and (last := self._decoded.first()) is not None and may_go(last):
            self._decoded.pop()
            if self._is_busy(last):
                kept.append(last)
            else:
                self._drop(last, evicted=True)
        for entry in kept:
            self._decoded.push(entry)

    def _is_busy(self, entry: Entry) -> bool:
        """Whether a trainer is reading the part, or holds it in the arena."""
        if entry.num_fetches:
            return True
        slot = entry.payload.slot if entry in self._lent and entry.payload is not None else None
        return slot is not None and self._arena is not None and self._arena.is_held(slot)

    def _lend(self, entry: Entry, num_bytes: int) -> None:
        self._lent[entry] = num_bytes
        self._lent_bytes += num_bytes

    def _take_back(self, entry: Entry) -> int:
        num_bytes = self._lent.pop(entry, 0)
        self._lent_bytes -= num_bytes
        return num_bytes

    def _drop(self, entry: Entry, *, evicted: bool = False) -> None:
        if entry.payload is None:
            return
        self._payload_bytes -= entry.payload.data.size
        self._take_back(entry)
        self._free(entry.payload)
        entry.payload = None
        if evicted:
            entry.evicted = True
            metrics.PARTS_EVICTED.inc()
        self._enqueue(entry)

    def _free(self, payload: Payload) -> None:
        if payload.slot is not None and self._arena is not None:
            self._arena.free(payload.slot)


def _size(entry: Entry) -> int:
    return entry.payload.data.size if entry.payload is not None else 0
