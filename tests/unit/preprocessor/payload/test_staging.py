"""The stages in front of the store: in the order of need, bounded in parts and in bytes, and never at a standstill."""

from __future__ import annotations

import asyncio
import contextlib

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.preprocessor.decoding import LoadedPart, LoadedSample
from headrace.preprocessor.payload.part import Entry, PartStage, Payload
from headrace.preprocessor.payload.payload_store import PayloadStore
from headrace.preprocessor.payload.priority import PriorityQueue
from headrace.preprocessor.payload.staging import ReadAhead
from headrace.preprocessor.records.record_to_sample import Image, Role, Sample, Turn
from headrace.sample import SampleRef
from tests.examples import with_examples

KIB = 1 << 10
MIB = 1 << 20


def make_entry(priority: int, *, step: int = 0) -> Entry:
    return Entry(ticket=f"t{priority}", job="job", step=step, priority=priority, refs=())


def media(num_bytes: int) -> LoadedPart:
    sample = Sample(turns=(Turn(role=Role.DOCUMENT, segments=(Image(data=bytes(num_bytes)),)),))
    return LoadedPart(samples={SampleRef(sample_id=0, shard=0, row=0): LoadedSample(sample=sample)})


def payload(num_bytes: int = MIB) -> Payload:
    return Payload(data=pa.py_buffer(bytes(num_bytes)), num_samples=1, rejected=())


def make_store(budget_bytes: int = 64 * MIB, *, max_bytes: int = 8 * MIB, max_parts: int = 4) -> tuple[PayloadStore, ReadAhead]:
    read_ahead = ReadAhead(max_bytes, max_parts)
    return PayloadStore(budget_bytes, None, read_ahead), read_ahead


def read(store: PayloadStore, num_bytes: int = KIB) -> str | None:
    """Read what is next, if the store lets it."""
    entry = store.next_to_read()
    if entry is None:
        return None
    store.put_loaded(entry, media(num_bytes))
    return entry.ticket


def decode(store: PayloadStore, num_bytes: int = MIB) -> str | None:
    """Decode what is next, if the store lets it."""
    entry = store.next_to_decode()
    if entry is None:
        return None
    store.put_payload(entry, payload(num_bytes))
    return entry.ticket


async def fetch(store: PayloadStore, entry: Entry) -> bool:
    async with store.held(entry) as found:
        if found is not None:
            store.mark_fetched(entry)
        return found is not None


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


# -- the order --------------------------------------------------------------------------------------------------------


def test_parts_are_read_and_decoded_in_the_order_in_which_they_are_needed() -> None:
    store, _ = make_store(max_parts=3)
    for priority in (3, 1, 4, 0, 2):
        store.add(make_entry(priority))
    assert [read(store) for _ in range(4)] == ["t0", "t1", "t2", None], "no more than three parts lie in memory"
    assert [decode(store) for _ in range(4)] == ["t0", "t1", "t2", None]
    assert [read(store) for _ in range(3)] == ["t3", "t4", None]


def test_a_part_that_is_slow_to_be_read_holds_up_no_other() -> None:
    store, _ = make_store()
    for priority in range(3):
        store.add(make_entry(priority))
    slow = store.next_to_read()
    assert slow is not None
    assert [read(store), read(store)] == ["t1", "t2"]
    assert [decode(store), decode(store), decode(store)] == ["t1", "t2", None]
    store.put_loaded(slow, media(KIB))
    assert decode(store) == "t0"


async def test_what_a_trainer_waits_for_is_read_and_decoded_first_however_full_it_is() -> None:
    store, _ = make_store(max_parts=2)
    entries = [store.add(make_entry(priority)) for priority in range(4)]
    assert [read(store) for _ in range(3)] == ["t0", "t1", None]
    fetching = asyncio.create_task(fetch(store, entries[3]))
    await settle()
    assert (read(store), decode(store)) == ("t3", "t3")
    assert await fetching


def test_what_is_needed_sooner_takes_the_place_of_what_was_read_for_later() -> None:
    """After the loss of another preprocessor, say, whose parts come here."""
    store, read_ahead = make_store(max_parts=2)
    later = [store.add(make_entry(priority)) for priority in (50, 51)]
    assert [read(store), read(store)] == ["t50", "t51"]
    store.add(make_entry(10))
    assert read(store) == "t10"
    assert [entry.stage for entry in later] == [PartStage.READ, PartStage.WAITING]
    assert read_ahead.held_bytes == 2 * KIB
    assert [decode(store), decode(store), read(store), decode(store)] == ["t10", "t50", "t51", "t51"]


def test_what_is_needed_later_does_not() -> None:
    store, _ = make_store(max_parts=1)
    store.add(make_entry(1))
    assert read(store) == "t1"
    store.add(make_entry(2))
    assert read(store) is None


# -- the bounds -------------------------------------------------------------------------------------------------------


def test_media_in_memory_are_bounded_in_bytes_until_they_are_decoded() -> None:
    store, read_ahead = make_store(max_bytes=1000 * KIB)
    for priority in range(4):
        store.add(make_entry(priority))
    assert [read(store, 400 * KIB) for _ in range(3)] == ["t0", "t1", None]
    decoding = store.next_to_decode()
    assert decoding is not None
    assert read(store, 400 * KIB) is None, "they are in memory still"
    store.put_payload(decoding, payload())
    assert read(store, 400 * KIB) == "t2"
    assert read_ahead.held_bytes == 800 * KIB


def test_what_is_being_read_counts_as_the_largest_of_late() -> None:
    store, _ = make_store(max_bytes=1000 * KIB)
    for priority in range(4):
        store.add(make_entry(priority))
    assert read(store, 400 * KIB) == "t0"
    assert store.next_to_read() is not None
    assert store.next_to_read() is None


def test_a_part_larger_than_all_room_is_read_alone() -> None:
    store, _ = make_store(max_bytes=100 * KIB)
    for priority in range(2):
        store.add(make_entry(priority))
    assert [read(store, 9 * MIB), read(store), decode(store), read(store)] == ["t0", None, "t0", "t1"]


def test_media_have_their_share_of_the_budget() -> None:
    store, read_ahead = make_store(4 * MIB, max_bytes=2 * MIB)
    for priority in range(9):
        store.add(make_entry(priority))
    for _ in range(9):
        read(store, 600 * KIB)
        decode(store)
        assert store.held_bytes + read_ahead.held_bytes <= 4 * MIB
        assert read_ahead.held_bytes <= 2 * MIB
    assert store.stage_parts == {PartStage.STORE: 2, PartStage.READ: 3, PartStage.WAITING: 4}


def test_all_pauses_when_the_store_is_full_and_goes_on_after_a_release() -> None:
    store, _ = make_store(2 * MIB + 16 * KIB, max_bytes=16 * KIB, max_parts=1)
    for priority in range(4):
        store.add(make_entry(priority, step=priority))
    assert [read(store), decode(store, MIB // 2), read(store), decode(store, 3 * MIB // 2)] == ["t0", "t0", "t1", "t1"]
    assert [read(store), decode(store), read(store)] == ["t2", None, None], "what is read waits for room"
    store.release("job", step=1)
    assert [decode(store), read(store)] == ["t2", "t3"]


# -- what is not wanted any more --------------------------------------------------------------------------------------


def test_a_release_frees_what_was_read_and_what_is_being_read() -> None:
    store, read_ahead = make_store()
    for priority in range(3):
        store.add(make_entry(priority))
    assert read(store) == "t0"
    reading = store.next_to_read()
    assert reading is not None
    decoding = store.next_to_decode()
    assert decoding is not None
    store.release("job")
    store.put_loaded(reading, media(KIB))
    store.put_payload(decoding, payload())
    assert (read_ahead.held_bytes, store.held_bytes, store.stage_parts) == (0, 0, {})
    assert store.stage_bytes == {PartStage.READ: 0, PartStage.DECODE: 0, PartStage.STORE: 0}
    store.add(make_entry(7))
    assert [read(store), decode(store)] == ["t7", "t7"], "the places are free"


def test_void_leases_leave_no_media_behind() -> None:
    store, read_ahead = make_store(max_parts=2)
    for priority in range(3):
        store.add(make_entry(priority))
    assert read(store) == "t0"
    reading = store.next_to_read()
    assert reading is not None
    store.void_leases()
    store.put_loaded(reading, media(KIB))
    assert (read_ahead.held_bytes, read(store), decode(store)) == (0, None, None)
    for priority in (1, 2):
        store.add(make_entry(priority))
    assert [read(store), read(store), decode(store)] == ["t1", "t2", "t1"]


async def test_a_trainer_that_gives_up_leaves_no_media_behind() -> None:
    store, read_ahead = make_store(max_parts=1)
    entry = store.add(make_entry(0))
    store.void_leases()
    fetching = asyncio.create_task(fetch(store, entry))
    await settle()
    assert read(store) == "t0"
    fetching.cancel()
    await asyncio.gather(fetching, return_exceptions=True)
    assert (read_ahead.held_bytes, decode(store)) == (0, None)
    store.add(make_entry(1))
    assert read(store) == "t1"


@pytest.mark.parametrize("stage", [PartStage.READ, PartStage.DECODE])
async def test_a_part_that_cannot_be_had_is_given_up(stage: PartStage) -> None:
    store, read_ahead = make_store(max_parts=1)
    entry = store.add(make_entry(0))
    fetching = asyncio.create_task(fetch(store, entry))
    await settle()
    taken = store.next_to_read()
    assert taken is entry
    if stage is PartStage.DECODE:
        store.put_loaded(entry, media(KIB))
        assert store.next_to_decode() is entry
    store.abandon(entry)
    assert not await fetching
    assert (store.get("t0"), read_ahead.held_bytes) == (None, 0)
    store.add(make_entry(0))
    assert [read(store), decode(store)] == ["t0", "t0"]


# -- any order --------------------------------------------------------------------------------------------------------


@with_examples(40)
@given(
    order=st.permutations(range(6)),
    budget_mib=st.integers(1, 3),
    workers=st.integers(1, 3),
    sizes=st.lists(st.integers(0, 2 * MIB), min_size=6, max_size=6),
)
def test_every_order_of_fetches_is_served(order: list[int], budget_mib: int, workers: int, sizes: list[int]) -> None:
    """No standstill, whatever the sizes of media and payload."""

    async def scenario() -> None:
        store, read_ahead = make_store(budget_mib * MIB, max_bytes=budget_mib * MIB // 8, max_parts=2)
        entries = [store.add(make_entry(priority)) for priority in range(6)]

        async def read_for_ever() -> None:
            while True:
                entry = await store.take_to_read()
                await asyncio.sleep(0)
                store.put_loaded(entry, media(sizes[entry.priority]))

        async def decode_for_ever() -> None:
            while True:
                entry = await store.take_to_decode()
                await asyncio.sleep(0)
                store.put_payload(entry, payload(sizes[-1 - entry.priority]))

        tasks = [asyncio.create_task(work()) for _ in range(workers) for work in (read_for_ever, decode_for_ever)]
        try:
            async with asyncio.timeout(5):
                for n in order[:3]:
                    assert await fetch(store, entries[n])
                assert all(await asyncio.gather(*(fetch(store, entries[n]) for n in order)))
        finally:
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks)
        assert store.held_bytes + read_ahead.held_bytes <= store.budget_bytes

    asyncio.run(scenario())


Step = tuple[str, int]


@given(st.lists(st.tuples(st.sampled_from(["push", "unwant", "pop", "prune"]), st.integers(0, 9)), max_size=80))
def test_the_queue_gives_what_a_search_through_all_would_give(steps: list[Step]) -> None:
    wanted: set[int] = set()
    twin: list[int] = []  # in the order in which they came
    queue = PriorityQueue[int](lambda item: item // 2, lambda item: item in wanted)
    for what, item in steps:
        if what == "push":
            wanted.add(item)
            queue.push(item)
            if item not in twin:
                twin.append(item)
        elif what == "unwant":
            wanted.discard(item)
        elif what == "prune":
            queue.prune()
            twin = [item for item in twin if item in wanted]
            assert len(queue) == len(twin)
        else:
            first = queue.first()
            left = [item for item in twin if item in wanted]
            assert first == min(left, key=lambda item: item // 2, default=None)
            if first is not None:
                assert queue.pop() == first
                twin.remove(first)


def test_what_is_next_costs_no_search_through_all_parts() -> None:
    """Looks at parts, counted: the same number whether ten parts wait or ten thousand."""

    def looks(num_parts: int) -> int:
        count = 0

        def wanted(_item: int) -> bool:
            nonlocal count
            count += 1
            return True

        queue = PriorityQueue[int](lambda item: item, wanted)
        for item in range(num_parts):
            queue.push(item)
        count = 0
        for _ in range(5):
            queue.first()
            queue.pop()
        return count

    assert looks(10) == looks(10_000)
