"""The payload store: bounded by its budget, never at a standstill (design section 3, invariant 4)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.preprocessor.payload.arena import Arena
from headrace.preprocessor.payload.payload_store import Entry, Payload, PayloadStore
from headrace.preprocessor.payload.writer import PayloadWriter
from headrace.transport.shared_memory import ArenaReader

MIB = 1 << 20


def make_entry(ticket: str, priority: int, *, step: int = 0, job: str = "job") -> Entry:
    return Entry(ticket=ticket, job=job, step=step, priority=priority, refs=())


def payload(num_bytes: int = MIB) -> Payload:
    return Payload(data=pa.py_buffer(bytes(num_bytes)), num_samples=1, rejected=())


def decode(store: PayloadStore, num_bytes: int = MIB) -> str | None:
    """Decode what is next, if the store lets it."""
    entry = store.next_to_decode()
    if entry is None:
        return None
    store.put_payload(entry, payload(num_bytes))
    return entry.ticket


async def read(store: PayloadStore, entry: Entry) -> Payload | None:
    async with store.held(entry) as found:
        return found


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_parts_are_decoded_in_the_order_in_which_they_are_needed() -> None:
    store = PayloadStore(10 * MIB)
    for ticket, priority in [("c", 3), ("a", 1), ("b", 2)]:
        store.add(make_entry(ticket, priority))
    assert [decode(store) for _ in range(4)] == ["a", "b", "c", None]


def test_decoding_ahead_pauses_when_the_budget_is_full_and_goes_on_after_a_release() -> None:
    store = PayloadStore(2 * MIB)
    for n in range(4):
        store.add(make_entry(f"t{n}", n, step=n))
    assert [decode(store) for _ in range(3)] == ["t0", "t1", None]
    assert store.held_bytes == 2 * MIB
    store.release("job", step=0)
    assert store.held_bytes == MIB
    assert decode(store) == "t2"


def test_what_is_being_decoded_has_its_room_set_aside() -> None:
    store = PayloadStore(2 * MIB)
    for n in range(3):
        store.add(make_entry(f"t{n}", n))
    assert store.next_to_decode() is not None
    assert store.next_to_decode() is not None
    assert store.next_to_decode() is None


def test_fetched_parts_make_room_first_then_those_that_are_needed_last() -> None:
    store = PayloadStore(3 * MIB)
    entries = {n: store.add(make_entry(f"t{n}", n)) for n in (4, 5, 6)}
    while decode(store):
        pass
    store.mark_fetched(entries[4])
    store.add(make_entry("t1", 1))
    assert decode(store) == "t1"
    assert entries[4].payload is None
    store.add(make_entry("t2", 2))
    assert decode(store) == "t2"
    assert entries[6].payload is None
    assert entries[5].payload is not None


def test_a_part_larger_than_the_budget_is_decoded_when_nothing_else_is_held() -> None:
    store = PayloadStore(MIB // 2)
    store.add(make_entry("huge", 0))
    assert decode(store, 5 * MIB) == "huge"


def test_taking_a_part_again_keeps_its_payload() -> None:
    store = PayloadStore(4 * MIB)
    first = store.add(make_entry("t", 0))
    decode(store)
    assert store.add(make_entry("t", 0)) is first
    assert first.payload is not None


async def test_a_wait_ends_when_the_part_is_decoded() -> None:
    store = PayloadStore(4 * MIB)
    entry = store.add(make_entry("t", 0))
    waiting = asyncio.create_task(read(store, entry))
    await settle()
    decode(store)
    assert await waiting is entry.payload


async def test_a_wait_for_a_part_that_is_released_meanwhile_ends_with_nothing() -> None:
    store = PayloadStore(4 * MIB)
    entry = store.add(make_entry("t", 0))
    waiting = asyncio.create_task(read(store, entry))
    await settle()
    taken = store.next_to_decode()
    store.release("job")
    assert await waiting is None
    assert taken is entry
    store.put_payload(taken, payload())
    assert store.held_bytes == 0
    assert store.get("t") is None


async def test_an_awaited_part_is_decoded_first_and_beyond_the_budget() -> None:
    store = PayloadStore(MIB)
    store.add(make_entry("first", 0))
    decode(store)
    last = store.add(make_entry("last", 9))
    assert decode(store) is None
    waiting = asyncio.create_task(read(store, last))
    await settle()
    assert decode(store) == "last"
    assert (await waiting) is not None


async def test_an_evicted_part_is_decoded_again_when_it_is_asked_for() -> None:
    store = PayloadStore(MIB)
    entry = store.add(make_entry("t", 5))
    decode(store)
    store.mark_fetched(entry)
    store.add(make_entry("other", 6))
    assert decode(store) == "other"
    assert entry.payload is None
    assert decode(store) is None, "a fetched part is not decoded ahead again"
    waiting = asyncio.create_task(read(store, entry))
    await settle()
    assert decode(store) == "t"
    assert await waiting is not None


async def test_a_part_is_not_evicted_while_it_is_read() -> None:
    store = PayloadStore(MIB)
    entry = store.add(make_entry("t", 5))
    decode(store)
    async with store.held(entry) as found:
        store.mark_fetched(entry)
        store.add(make_entry("urgent", 0))
        assert decode(store) is None
        assert entry.payload is found
    assert decode(store) == "urgent"


async def test_take_waits_for_work_and_for_room() -> None:
    store = PayloadStore(MIB)
    taking = asyncio.create_task(store.take_to_decode())
    await settle()
    assert not taking.done()
    store.add(make_entry("a", 0, step=0))
    store.put_payload(await taking, payload())
    store.add(make_entry("b", 1, step=1))
    taking = asyncio.create_task(store.take_to_decode())
    await settle()
    assert not taking.done()
    store.release("job", step=0)
    assert (await taking).ticket == "b"


def test_void_leases_keep_what_is_decoded_and_decode_nothing_ahead() -> None:
    store = PayloadStore(4 * MIB)
    decoded, other = store.add(make_entry("a", 0)), store.add(make_entry("b", 1))
    decode(store)
    store.void_leases()
    assert decode(store) is None
    assert decoded.payload is not None
    store.add(make_entry("b", 1))
    assert decode(store) == "b"
    assert other.payload is not None


def test_releasing_one_job_leaves_the_others() -> None:
    store = PayloadStore(8 * MIB)
    store.add(make_entry("a", 0, job="one"))
    store.add(make_entry("b", 0, job="two"))
    store.release("one")
    assert store.get("a") is None


# -- in the arena -----------------------------------------------------------------------------------------------------


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena(4 * MIB, tmp_path)
    yield arena
    arena.close()


def write(arena: Arena | None, num_bytes: int, *, with_checksum: bool = False) -> Payload:
    batch = pa.record_batch({"bytes": pa.array([bytes(range(256)) * (num_bytes // 256)])})
    return PayloadWriter(arena, with_checksum=with_checksum).write(batch, ())


def test_a_part_has_the_same_bytes_in_the_arena_and_on_the_heap(arena: Arena) -> None:
    shared, heap = write(arena, MIB), write(None, MIB)
    assert shared.slot is not None
    assert heap.slot is None
    assert shared.data.equals(heap.data)
    with pa.ipc.open_stream(shared.data) as reader:
        assert reader.read_next_batch().num_rows == shared.num_samples == 1


def test_where_the_arena_is_full_parts_lie_on_the_heap(arena: Arena) -> None:
    slots = [write(arena, MIB).slot for _ in range(5)]
    assert [slot is not None for slot in slots] == [True, True, True, False, False], "heads and metadata take some room"


def test_every_way_out_of_the_store_frees_the_slot(arena: Arena) -> None:
    store = PayloadStore(4 * MIB, arena)
    for n in range(4):
        store.add(make_entry(f"t{n}", n, step=n))
    for size in (MIB, MIB, 3 * MIB // 2):
        entry = store.next_to_decode()
        assert entry is not None
        store.put_payload(entry, write(arena, size))
    late = store.get("t3")
    assert late is not None
    late.decoding = True
    store.release("job", step=0)
    entries = [entry for n in (1, 2) if (entry := store.get(f"t{n}")) is not None and entry.payload is not None]
    assert arena.statistics().used_bytes == sum(entry.payload.slot.num_bytes for entry in entries)  # type: ignore[union-attr]
    store.release("job")
    store.put_payload(late, write(arena, MIB))
    assert (arena.statistics().used_bytes, store.held_bytes) == (0, 0)


async def test_a_release_waits_for_who_is_being_sent_the_part(arena: Arena) -> None:
    store = PayloadStore(4 * MIB, arena)
    entry = store.add(make_entry("t", 0))
    assert store.next_to_decode() is entry
    store.put_payload(entry, write(arena, MIB))
    async with store.held(entry) as found:
        store.release("job")
        assert entry.payload is found
        assert store.held_bytes > MIB
    assert (arena.statistics().used_bytes, store.held_bytes) == (0, 0)


def test_a_part_that_a_trainer_holds_is_not_evicted(arena: Arena) -> None:
    store = PayloadStore(2 * MIB, arena)
    for n in range(2):
        entry = store.add(make_entry(f"t{n}", n))
        assert store.next_to_decode() is entry
        store.put_payload(entry, write(arena, 900_000))
        store.mark_fetched(entry)
    held, other = store.get("t0"), store.get("t1")
    assert held is not None
    assert other is not None
    slot = store.lend(held)
    assert slot is not None
    _, let_go = ArenaReader(arena.path.name, arena.path.parent).view(slot.offset, slot.buffer.size, slot.generation)
    store.add(make_entry("t2", 2))
    assert store.next_to_decode() is not None
    assert held.payload is not None
    assert other.payload is None
    let_go()
    store.add(make_entry("t3", 3))
    assert store.next_to_decode() is not None
    assert held.payload is None


def test_damage_is_seen_with_a_checksum_only(arena: Arena) -> None:
    for with_checksum in (True, False):
        part = write(arena, MIB, with_checksum=with_checksum)
        assert not part.is_damaged
        memoryview(part.data).cast("B")[MIB // 2] ^= 1
        assert part.is_damaged is with_checksum


Operation = tuple[str, int]
operations = st.lists(
    st.tuples(st.sampled_from(["add", "decode", "fetch", "release", "disconnect"]), st.integers(0, 7)), max_size=60
)


@given(operations, st.integers(1, 4), st.lists(st.integers(0, 3 * MIB), min_size=8, max_size=8))
def test_without_waiters_the_budget_holds_whatever_happens(run: list[Operation], budget_mib: int, sizes: list[int]) -> None:
    store = PayloadStore(budget_mib * MIB)
    for what, n in run:
        entry = store.get(f"t{n}")
        if what == "add":
            store.add(make_entry(f"t{n}", n, step=n))
        elif what == "decode":
            decode(store, sizes[n])
        elif what == "fetch" and entry is not None and entry.payload is not None:
            store.mark_fetched(entry)
        elif what == "release":
            store.release("job", step=n)
        elif what == "disconnect":
            store.void_leases()
        held = [entry.payload.data.size for n in range(8) if (entry := store.get(f"t{n}")) and entry.payload]
        assert store.held_bytes == sum(held)
        assert store.held_bytes <= store.budget_bytes or len(list(filter(None, held))) == 1


@given(st.permutations(range(6)), st.integers(1, 3), st.integers(1, 3))
def test_every_order_of_fetches_is_served(order: list[int], budget_mib: int, decoders: int) -> None:
    """No standstill: consumers may ask for the parts in any order, one after another or at once."""

    async def scenario() -> None:
        store = PayloadStore(budget_mib * MIB)
        entries = [store.add(make_entry(f"t{n}", n)) for n in range(6)]

        async def decode_for_ever() -> None:
            while True:
                entry = await store.take_to_decode()
                await asyncio.sleep(0)
                store.put_payload(entry, payload())

        async def fetch(n: int) -> None:
            async with store.held(entries[n]) as found:
                assert found is not None
                store.mark_fetched(entries[n])

        workers = [asyncio.create_task(decode_for_ever()) for _ in range(decoders)]
        try:
            async with asyncio.timeout(5):
                for n in order[:3]:
                    await fetch(n)
                await asyncio.gather(*(fetch(n) for n in order))
        finally:
            for worker in workers:
                worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*workers)
        assert store.held_bytes <= store.budget_bytes

    asyncio.run(scenario())


@pytest.mark.parametrize("waiters", [1, 3])
async def test_a_reader_that_gives_up_leaves_no_trace(waiters: int) -> None:
    store = PayloadStore(MIB)
    entry = store.add(make_entry("t", 0))
    tasks = [asyncio.create_task(read(store, entry)) for _ in range(waiters)]
    await settle()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert entry.num_fetches == 0
