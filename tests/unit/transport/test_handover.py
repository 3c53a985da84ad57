"""Parts from real preprocessors' servers to real clients: how they come, who holds them, and what breaks on the way."""

from __future__ import annotations

import logging
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import trainer
from headrace.errors import NotFoundError, UnavailableError, UserError
from headrace.transport.shared_memory import FOLDER
from preprocessor.arena import remove_stale
from trainer.client import Part, PartClient
from trainer.fetch import PartFetcher

MIB = 1 << 20


def payload(part: Part) -> np.ndarray:
    return part.batch.column("patches").values.to_numpy()


def is_held(producer: Any, ticket: str) -> bool:
    entry = producer.call(lambda: producer.store.get(ticket))
    return bool(producer.arena.is_held(entry.payload.slot))


# -- which transport --------------------------------------------------------------------------------------------------


def test_on_one_host_the_payload_is_read_where_the_preprocessor_wrote_it(
    make_producer: Any, make_client: Any, make_batch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    producer, client = make_producer(), make_client()
    producer.add("part", make_batch(MIB, 7))
    with caplog.at_level(logging.INFO):
        parts = [client.fetch(producer.endpoint, "part") for _ in range(3)]
    assert parts[0].batch.equals(make_batch(MIB, 7))
    written = producer.call(lambda: producer.store.get("part").payload.data)
    np.frombuffer(written, np.uint8)[MIB // 2] = 99
    assert (payload(parts[0]) == 99).sum() == 1, "no copy"
    assert client.num_parts == producer.servicer.num_parts == {"shared_memory": 3}
    chosen = [record.getMessage() for record in caplog.records if "transport=" in record.getMessage()]
    assert chosen == [f"receiving endpoint={producer.endpoint} transport=shared_memory"], "once per connection"


def test_chunks_are_taken_where_they_are_asked_for(make_producer: Any, make_client: Any, make_batch: Any) -> None:
    producer, client = make_producer(), make_client("grpc")
    producer.add("part", make_batch(3 * MIB + 5, 7))
    part = client.fetch(producer.endpoint, "part")
    assert part.batch.equals(make_batch(3 * MIB + 5, 7))
    assert client.num_parts == producer.servicer.num_parts == {"grpc": 1}
    assert not is_held(producer, "part")


def test_chunks_are_taken_where_the_preprocessor_has_no_shared_memory(
    make_producer: Any, make_client: Any, make_batch: Any
) -> None:
    producer, client = make_producer(shared=False), make_client()
    producer.add("part", make_batch(MIB))
    assert client.fetch(producer.endpoint, "part").delivery.transport == "grpc"
    with pytest.raises(UserError, match="shared_memory is asked for, but not possible"):
        make_client("shared_memory").fetch(producer.endpoint, "part")


def test_chunks_are_taken_where_the_arena_is_not_the_one_in_our_dev_shm(
    make_producer: Any, make_client: Any, make_batch: Any
) -> None:
    """As with a container that has a /dev/shm of its own: the name is there for the preprocessor, not for us."""
    producer, client = make_producer(), make_client()
    producer.arena.path.unlink()
    producer.add("part", make_batch(MIB))
    assert client.fetch(producer.endpoint, "part").delivery.transport == "grpc"


def test_a_file_of_that_name_with_other_contents_is_no_proof(make_producer: Any, make_client: Any, make_batch: Any) -> None:
    producer, client = make_producer(), make_client()
    contents = bytearray(producer.arena.path.read_bytes()[:4096])
    contents[8:24] = bytes(16)  # the token
    producer.arena.path.unlink()
    producer.arena.path.write_bytes(contents)
    producer.add("part", make_batch(MIB, 7))
    part = client.fetch(producer.endpoint, "part")
    assert part.delivery.transport == "grpc"
    assert part.batch.equals(make_batch(MIB, 7))


@pytest.mark.parametrize("transports", [(), ("smoke_signals",), ("grpc", "udp")])
def test_an_unknown_transport_is_refused(transports: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="must be some of shared_memory, grpc"):
        PartClient(transports)


@pytest.mark.parametrize("transport", ["shared_memory", "grpc"])
def test_a_part_that_is_not_held_is_not_found(make_producer: Any, make_client: Any, make_batch: Any, transport: str) -> None:
    producer, client = make_producer(), make_client("grpc", transport)
    producer.add("part", make_batch(MIB))
    client.fetch(producer.endpoint, "part")
    with pytest.raises(NotFoundError, match="'other' is not held here"):
        client.fetch(producer.endpoint, "other")


def test_two_preprocessors_on_one_host_have_an_arena_each(make_producer: Any, make_client: Any, make_batch: Any) -> None:
    producers, client = [make_producer(), make_producer()], make_client()
    for number, producer in enumerate(producers):
        producer.add("part", make_batch(MIB, number))
    assert [payload(client.fetch(producer.endpoint, "part"))[0] for producer in producers] == [0, 1]
    assert client.num_parts == {"shared_memory": 2}


def test_many_threads_fetch_at_once(make_producer: Any, make_client: Any, make_batch: Any) -> None:
    producer, client = make_producer(64 * MIB), make_client()
    for number in range(40):
        producer.add(f"part-{number}", make_batch(100_000 + number, number))

    def fetch(number: int) -> bool:
        part = client.fetch(producer.endpoint, f"part-{number}")
        return part.batch.equals(make_batch(100_000 + number, number))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(fetch, range(40)))


# -- who holds a slot -------------------------------------------------------------------------------------------------


def test_a_part_that_is_read_stays_though_its_step_is_released_and_the_room_is_wanted(
    make_producer: Any, make_client: Any, make_batch: Any
) -> None:
    producer, client = make_producer(4 * MIB), make_client()
    producer.add("read", make_batch(MIB, 7))
    part = client.fetch(producer.endpoint, "read")
    producer.commit(0)
    assert producer.call(lambda: producer.store.held_bytes) > MIB, "counts in the budget until it is let go of"
    for step in range(1, 10):
        producer.add(f"other-{step}", make_batch(MIB, step), step=step)
        client.fetch(producer.endpoint, f"other-{step}").delivery.release()
        producer.commit(step)
    assert (payload(part) == 7).all()
    part.delivery.release()
    assert producer.call(lambda: producer.store.held_bytes) == 0


def test_no_more_than_its_share_of_the_budget_is_lent(make_producer: Any, make_client: Any, make_batch: Any) -> None:
    producer, client = make_producer(8 * MIB), make_client()
    for number in range(5):
        producer.add(f"part-{number}", make_batch(MIB, number))
    parts = [client.fetch(producer.endpoint, f"part-{number}") for number in range(5)]
    assert [part.delivery.transport for part in parts] == 3 * ["shared_memory"] + 2 * ["grpc"], "4 MiB, heads included"
    parts[0].delivery.release()
    assert client.fetch(producer.endpoint, "part-4").delivery.transport == "shared_memory"


def test_a_reader_that_keeps_everything_stops_nobody(make_producer: Any, make_client: Any, make_batch: Any) -> None:
    """The arena is full of parts that are held: those that are asked for now come from the heap."""
    producer, client = make_producer(2 * MIB), make_client()
    batches = {f"part-{number}": make_batch(600_000, number) for number in range(12)}
    for number, (ticket, batch) in enumerate(batches.items()):
        producer.add(ticket, batch, step=number)
    parts = {ticket: client.fetch(producer.endpoint, ticket) for ticket in batches}
    assert all(parts[ticket].batch.equals(batch) for ticket, batch in batches.items())
    assert producer.arena.statistics().high_water_bytes <= 2 * MIB
    assert {part.delivery.transport for part in parts.values()} == {"shared_memory", "grpc"}


def test_a_killed_trainer_gives_its_slots_back(make_producer: Any, make_batch: Any, spawn: Any) -> None:
    producer = make_producer()
    producer.add("part", make_batch(MIB))
    reader, (said,) = spawn("hold", producer.arena.path.name, "part")
    assert said == "held"
    assert is_held(producer, "part")
    reader.send_signal(signal.SIGKILL)
    reader.wait()
    assert not is_held(producer, "part")
    producer.commit(0)
    assert producer.arena.statistics().used_bytes == 0


def test_a_broken_connection_gives_no_slot_back(make_producer: Any, make_client: Any, make_batch: Any) -> None:
    producer, client = make_producer(), make_client()
    producer.add("part", make_batch(MIB, 7))
    part = client.fetch(producer.endpoint, "part")
    client.close()
    assert is_held(producer, "part")
    part.delivery.release()
    assert not is_held(producer, "part")


def test_parts_are_held_from_their_fetch_to_their_release(make_producer: Any, make_batch: Any) -> None:
    producer = make_producer()
    tickets = ["used", "taken", "ready"]
    for ticket in tickets:
        producer.add(ticket, make_batch(MIB))
    fetcher = PartFetcher(lambda ticket, lease: None, max_parts=8, max_bytes=99 * MIB, threads=1)
    fetcher.queue(tickets)
    for ticket in tickets:
        fetcher.place(ticket, "lease", producer.endpoint)
    for ticket in tickets[:2]:
        fetcher.take(ticket)
    fetcher._futures["ready"].result(timeout=10)
    assert [is_held(producer, ticket) for ticket in tickets] == [True, True, True]
    fetcher.release(["used"])
    assert [is_held(producer, ticket) for ticket in tickets] == [False, True, True]
    fetcher.close()
    assert [is_held(producer, ticket) for ticket in tickets] == [False, False, False]


@pytest.mark.parametrize("transport", ["shared_memory", "grpc"])
def test_closing_ends_the_wait_for_a_part(make_producer: Any, make_batch: Any, transport: str) -> None:
    producer = make_producer()
    producer.add_stuck("stuck")
    client = PartClient((transport,))
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(client.fetch, producer.endpoint, "stuck")
        while not producer.call(lambda: producer.store.get("stuck").waiting):
            assert not fetching.done()
        client.close()
        with pytest.raises(UnavailableError):
            fetching.result(timeout=10)


def test_a_step_s_parts_are_held_until_it_is_committed(make_producer: Any, make_batch: Any, make_world: Any) -> None:
    """Parts of which a microbatch has several are copied together: they go back at once."""
    producer, world = make_producer(), make_world()
    tickets = ["alone", "first", "second"]
    for ticket in tickets:
        producer.add(ticket, make_batch(0))
    world.tell(world.plan(0, ["alone"], ["first", "second"]))
    world.tell(*(world.place(ticket, endpoint=producer.endpoint) for ticket in tickets))
    with trainer.connect(world.endpoint, job="job") as loader:
        step = next(iter(loader))
        assert [len(microbatch.data.sample_ids) for microbatch in step] == [1, 2]
        assert [is_held(producer, ticket) for ticket in tickets] == [True, False, False]
        loader.commit(step)
        assert not is_held(producer, "alone")


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_killed_preprocessor_takes_nothing_away_and_leaves_nothing_behind(
    make_producer: Any, make_client: Any, make_batch: Any, spawn: Any
) -> None:
    owner, (endpoint, arena) = spawn("produce")
    client = make_client()
    part = client.fetch(endpoint, "part")
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert (payload(part) == 7).all()
    with pytest.raises(UnavailableError):
        client.fetch(endpoint, "part")
    remove_stale()
    assert not [path for path in FOLDER.iterdir() if path.name.startswith(arena)]
    other = make_producer()
    other.add("part", make_batch(MIB, 7))
    assert client.fetch(other.endpoint, "part").batch.equals(part.batch)


def test_a_preprocessor_started_anew_at_the_same_endpoint_is_read_through_its_new_arena(
    make_producer: Any, make_client: Any, make_batch: Any
) -> None:
    former, client = make_producer(), make_client()
    former.add("part", make_batch(MIB, 1))
    assert payload(client.fetch(former.endpoint, "part"))[0] == 1
    former.stop()
    latter = make_producer(listen=former.endpoint)
    latter.add("part", make_batch(MIB, 2))
    parts = [fetch_again(client, latter.endpoint, "part") for _ in range(2)]
    assert [payload(part)[0] for part in parts] == [2, 2]
    assert parts[1].delivery.transport == "shared_memory"


def fetch_again(client: PartClient, endpoint: str, ticket: str) -> Part:
    """A first attempt may find the old connection broken, as the fetcher's may."""
    try:
        return client.fetch(endpoint, ticket)
    except UnavailableError:
        return client.fetch(endpoint, ticket)


def test_a_wire_that_is_cut_in_the_middle_of_a_part_is_told_and_the_part_comes_another_way(
    make_producer: Any, make_client: Any, make_batch: Any, make_wire: Any
) -> None:
    producer, client = make_producer(), make_client("grpc")
    producer.add("part", make_batch(6 * MIB, 7))
    wire = make_wire(producer.endpoint, cut_after_bytes=3 * MIB)
    with pytest.raises(UnavailableError):
        client.fetch(wire.endpoint, "part")
    assert client.fetch(producer.endpoint, "part").batch.equals(make_batch(6 * MIB, 7))


def test_a_part_that_is_damaged_on_the_wire_is_told_and_fetched_again(
    make_producer: Any, make_client: Any, make_batch: Any, make_wire: Any
) -> None:
    producer, client = make_producer(with_checksum=True), make_client("grpc")
    producer.add("part", make_batch(MIB, 7))
    wire = make_wire(producer.endpoint, flips=bytes([7]) * 1000)
    with pytest.raises(UnavailableError, match="came damaged through grpc"):
        client.fetch(wire.endpoint, "part")
    assert client.fetch(wire.endpoint, "part").batch.equals(make_batch(MIB, 7))


def test_a_part_that_is_damaged_in_its_slot_is_told_and_decoded_again_when_it_is_leased_again(
    make_producer: Any, make_client: Any, make_batch: Any
) -> None:
    producer, client = make_producer(with_checksum=True), make_client()
    producer.add("part", make_batch(MIB, 7))
    client.fetch(producer.endpoint, "part").delivery.release()
    written = producer.call(lambda: producer.store.get("part").payload.data)
    np.frombuffer(written, np.uint8)[MIB // 2] ^= 1
    with pytest.raises(UnavailableError, match="came damaged through shared_memory"):
        client.fetch(producer.endpoint, "part")
    assert not is_held(producer, "part")
    producer.add("part", make_batch(MIB, 7))
    assert client.fetch(producer.endpoint, "part").batch.equals(make_batch(MIB, 7))
    assert producer.num_decoded == 2


def test_a_whole_part_that_is_leased_again_is_not_decoded_again(make_producer: Any, make_client: Any, make_batch: Any) -> None:
    producer, client = make_producer(with_checksum=True), make_client()
    for _ in range(3):
        producer.add("part", make_batch(MIB, 7))
        client.fetch(producer.endpoint, "part").delivery.release()
    assert producer.num_decoded == 1
