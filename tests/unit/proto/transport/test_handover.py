"""Parts from real preprocessors' servers to real clients: how they come, who holds them, and what breaks on the way."""

from __future__ import annotations

import logging
import signal
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headrace import trainer
from headrace.errors import NotFoundError, UnavailableError, UserError
from headrace.preprocessor.payload.arena import remove_stale
from headrace.ticket import make_ticket
from headrace.trainer.loading.fetch import PartFetcher
from headrace.trainer.loading.part_client import FetchedPart, PartClient
from headrace.transport.base import DamagedError
from headrace.transport.shared_memory import FOLDER, socket_path

MIB = 1 << 20


def rows(part: FetchedPart) -> pa.RecordBatch:
    """All of its rows, in one batch."""
    (batch,) = pa.Table.from_batches(part.batches).combine_chunks().to_batches()
    return batch


def payload(part: FetchedPart) -> np.ndarray:
    (batch,) = part.batches
    return batch.column("patches").values.to_numpy()


# -- which transport --------------------------------------------------------------------------------------------------


def test_on_one_host_the_payload_is_read_where_the_preprocessor_wrote_it(
    make_producer: Any, make_client: Any, make_batch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    producer, client = make_producer(), make_client()
    producer.add("part", make_batch(MIB, 7))
    with caplog.at_level(logging.INFO):
        parts = [client.fetch(producer.endpoint, "part") for _ in range(3)]
    assert rows(parts[0]).equals(make_batch(MIB, 7))
    producer.payload("part")[MIB // 2] = 99
    assert (payload(parts[0]) == 99).sum() == 1, "no copy"
    assert {part.delivery.transport for part in parts} == {"shared_memory"}
    assert producer.servicer.num_parts == {"shared_memory": 3}
    chosen = [record.getMessage() for record in caplog.records if "transport=" in record.getMessage()]
    assert chosen == [f"receiving endpoint={producer.endpoint} transport=shared_memory"], "once per connection"


def test_flight_is_taken_where_it_is_asked_for(make_producer: Any, make_client: Any, make_batch: Any) -> None:
    producer, client = make_producer(), make_client("flight")
    producer.add("part", make_batch(3 * MIB + 5, 7))
    part = client.fetch(producer.endpoint, "part")
    assert rows(part).equals(make_batch(3 * MIB + 5, 7))
    assert part.delivery.transport == "flight"
    assert producer.servicer.num_parts == {"flight": 1}
    assert not producer.is_held("part")


def test_flight_is_taken_where_the_preprocessor_has_no_shared_memory(
    make_producer: Any, make_client: Any, make_batch: Any
) -> None:
    producer, client = make_producer(shared=False), make_client()
    producer.add("part", make_batch(MIB))
    assert client.fetch(producer.endpoint, "part").delivery.transport == "flight"
    with pytest.raises(UserError, match=r"\(shared_memory: the preprocessor has no shared memory\): .* or allow flight"):
        make_client("shared_memory").fetch(producer.endpoint, "part")


def test_flight_is_taken_where_the_arena_is_not_the_one_in_our_dev_shm(
    make_producer: Any, make_client: Any, make_batch: Any
) -> None:
    """As with a container that has a /dev/shm of its own: the name is there for the preprocessor, not for us."""
    producer, client = make_producer(), make_client()
    producer.arena.path.unlink()
    producer.add("part", make_batch(MIB))
    assert client.fetch(producer.endpoint, "part").delivery.transport == "flight"


def test_a_file_of_that_name_with_other_contents_is_no_proof(make_producer: Any, make_client: Any, make_batch: Any) -> None:
    producer, client = make_producer(), make_client()
    contents = bytearray(producer.arena.path.read_bytes()[:4096])
    contents[8:24] = bytes(16)  # the token
    producer.arena.path.unlink()
    producer.arena.path.write_bytes(contents)
    producer.add("part", make_batch(MIB, 7))
    part = client.fetch(producer.endpoint, "part")
    assert part.delivery.transport == "flight"
    assert rows(part).equals(make_batch(MIB, 7))


@pytest.mark.parametrize("transports", [(), ("smoke_signals",), ("flight", "udp")])
def test_an_unknown_transport_is_refused(transports: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="must be some of shared_memory, ucx, flight"):
        PartClient(transports)


@pytest.mark.parametrize("transport", ["shared_memory", "flight"])
def test_a_part_comes_to_whoever_has_its_ticket_and_to_nobody_else(
    make_producer: Any, make_client: Any, make_batch: Any, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    producer, client = make_producer(signed=True), make_client(transport)
    genuine, forged = make_ticket("job", "part", bytes(32)), make_ticket("job", "part", b"another key")
    for ticket in (genuine, forged):
        producer.add(ticket, make_batch(MIB))
    assert client.fetch(producer.endpoint, genuine).delivery.transport == transport
    for ticket, reason in [
        (make_ticket("job", "other", bytes(32)), "is not held here"),
        (forged, "does not bear the signature of its job"),
        (genuine[:-1], "does not bear the signature of its job"),
        ("job", "does not bear the signature of its job"),
        (make_ticket("other-job", "part", bytes(32)), "the job of ticket .* is not known here"),
        ("", "the job of ticket '' is not known here"),
    ]:
        with pytest.raises(NotFoundError, match=reason):
            client.fetch(producer.endpoint, ticket)
    assert producer.servicer.num_parts == {transport: 1}
    assert client.fetch(producer.endpoint, genuine).delivery.transport == transport
    refused = [text for record in caplog.records if (text := record.getMessage()).startswith("refused a call")]
    for line in refused:
        assert line.startswith("refused a call method=DoGet peer=ipv4:127.0.0.1:"), "shared memory is of this host alone"
    reasons = [reason for reason in ('"forged ticket"', '"ticket of an unknown job"') if any(reason in line for line in refused)]
    assert len(reasons) == (2 if transport == "flight" else 0), refused


@pytest.mark.parametrize("transport", ["shared_memory", "flight"])
def test_only_the_columns_asked_for_are_told(make_producer: Any, make_batch: Any, transport: str) -> None:
    producer, columns = make_producer(with_checksum=True), ("labels", "sample_id")
    producer.add("part", make_batch(MIB, 7))
    client = PartClient((transport,), columns)
    part = client.fetch(producer.endpoint, "part")
    assert part.delivery.transport == transport
    assert rows(part).equals(make_batch(MIB, 7).select(["sample_id", "labels"]))
    client.close()


def test_an_unknown_column_is_refused() -> None:
    with pytest.raises(UserError, match=r"columns \('pixels',\) must be some of sample_id, input_ids"):
        PartClient(columns=("pixels",))


def test_two_preprocessors_on_one_host_have_an_arena_each(make_producer: Any, make_client: Any, make_batch: Any) -> None:
    producers, client = [make_producer(), make_producer()], make_client()
    for number, producer in enumerate(producers):
        producer.add("part", make_batch(MIB, number))
    parts = [client.fetch(producer.endpoint, "part") for producer in producers]
    assert [payload(part)[0] for part in parts] == [0, 1]
    assert [part.delivery.transport for part in parts] == ["shared_memory", "shared_memory"]


@pytest.mark.parametrize("transport", ["shared_memory", "flight"])
def test_many_threads_fetch_at_once(make_producer: Any, make_client: Any, make_batch: Any, transport: str) -> None:
    producer, client = make_producer(64 * MIB), make_client(transport)
    batches = {str(number): make_batch(100_000 + number, number) for number in range(40)}
    for ticket, batch in batches.items():
        producer.add(ticket, batch)

    def fetch(ticket: str) -> bool:
        return rows(client.fetch(producer.endpoint, ticket)).equals(batches[ticket])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(fetch, batches))


# -- who holds a slot -------------------------------------------------------------------------------------------------


def test_a_part_that_is_read_stays_though_its_step_is_released_and_the_room_is_wanted(
    make_producer: Any, make_client: Any, make_batch: Any
) -> None:
    producer, client = make_producer(4 * MIB), make_client()
    producer.add("part", make_batch(MIB, 7))
    part = client.fetch(producer.endpoint, "part")
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
    tickets = [str(number) for number in range(5)]
    for number, ticket in enumerate(tickets):
        producer.add(ticket, make_batch(MIB, number))
    parts = [client.fetch(producer.endpoint, ticket) for ticket in tickets]
    assert [part.delivery.transport for part in parts] == 3 * ["shared_memory"] + 2 * ["flight"], "4 MiB, heads included"
    parts[0].delivery.release()
    assert client.fetch(producer.endpoint, tickets[4]).delivery.transport == "shared_memory"


def test_a_reader_that_keeps_everything_stops_nobody(make_producer: Any, make_client: Any, make_batch: Any) -> None:
    """The arena is full of parts that are held: those that are asked for now come from the heap."""
    producer, client = make_producer(2 * MIB), make_client()
    batches = {str(number): make_batch(600_000, number) for number in range(12)}
    for number, (ticket, batch) in enumerate(batches.items()):
        producer.add(ticket, batch, step=number)
    parts = {ticket: client.fetch(producer.endpoint, ticket) for ticket in batches}
    assert all(rows(parts[ticket]).equals(batch) for ticket, batch in batches.items())
    assert producer.arena.statistics().high_water_bytes <= 2 * MIB
    assert {part.delivery.transport for part in parts.values()} == {"shared_memory", "flight"}


def test_a_question_that_announces_more_than_a_ticket_is_not_waited_for(make_producer: Any) -> None:
    """Else whoever opens connections has a preprocessor buffer up to the announced length of each."""
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(10.0)
        stranger.connect(str(socket_path(make_producer().arena.path)))
        stranger.sendall(struct.pack("<I", 32 * MIB) + bytes(4096))
        try:
            answer = stranger.recv(1)
        except ConnectionResetError:  # what had come was not read
            answer = b""
    assert answer == b""


def test_a_killed_trainer_gives_its_slots_back(make_producer: Any, make_batch: Any, spawn: Any) -> None:
    producer = make_producer()
    producer.add("part", make_batch(MIB))
    reader, (said,) = spawn("hold", producer.arena.path.name, "part")
    assert said == "held"
    assert producer.is_held("part")
    reader.send_signal(signal.SIGKILL)
    reader.wait()
    assert not producer.is_held("part")
    producer.commit(0)
    assert producer.arena.statistics().used_bytes == 0


def test_a_broken_connection_gives_no_slot_back(make_producer: Any, make_client: Any, make_batch: Any) -> None:
    producer, client = make_producer(), make_client()
    producer.add("part", make_batch(MIB, 7))
    part = client.fetch(producer.endpoint, "part")
    client.close()
    assert producer.is_held("part")
    part.delivery.release()
    assert not producer.is_held("part")


def test_parts_are_held_from_their_fetch_to_their_release(make_producer: Any, make_batch: Any) -> None:
    producer = make_producer()
    tickets = ["used", "taken", "ready"]
    for ticket in tickets:
        producer.add(ticket, make_batch(MIB))
    fetcher = PartFetcher(lambda ticket, lease: None, max_parts=8, max_bytes=99 * MIB, threads=1)
    fetcher.queue(tickets)
    for ticket in tickets:
        fetcher.set_location(ticket, "lease", producer.endpoint)
    for ticket in tickets[:2]:
        fetcher.take(ticket)
    fetcher._futures[tickets[2]].result(timeout=10)
    assert [producer.is_held(ticket) for ticket in tickets] == [True, True, True]
    fetcher.release(tickets[:1])
    assert [producer.is_held(ticket) for ticket in tickets] == [False, True, True]
    fetcher.close()
    assert [producer.is_held(ticket) for ticket in tickets] == [False, False, False]


@pytest.mark.parametrize("transport", ["shared_memory", "flight"])
def test_closing_ends_the_wait_for_a_part(make_producer: Any, make_batch: Any, transport: str) -> None:
    producer = make_producer()
    producer.add_stuck("part")
    client = PartClient((transport,))
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(client.fetch, producer.endpoint, "part")
        while not producer.num_waiting("part"):
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
    world.tell(world.plan(0, tickets[:1], tickets[1:]))
    world.tell(*(world.place(ticket, endpoint=producer.endpoint) for ticket in tickets))
    with trainer.connect(world.endpoint, job="job") as loader:
        step = next(iter(loader))
        assert [len(microbatch.data.sample_ids) for microbatch in step] == [1, 2]
        assert [producer.is_held(ticket) for ticket in tickets] == [True, False, False]
        loader.commit(step)
        assert not producer.is_held(tickets[0])


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
    assert rows(client.fetch(other.endpoint, "part")).equals(rows(part))


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


def fetch_again(client: PartClient, endpoint: str, ticket: str) -> FetchedPart:
    """A first attempt may find the old connection broken, as the fetcher's may."""
    try:
        return client.fetch(endpoint, ticket)
    except UnavailableError:
        return client.fetch(endpoint, ticket)


def test_a_part_that_is_damaged_in_its_slot_is_told_and_decoded_again_when_it_is_leased_again(
    make_producer: Any, make_client: Any, make_batch: Any
) -> None:
    producer, client = make_producer(with_checksum=True), make_client()
    producer.add("part", make_batch(MIB, 7))
    client.fetch(producer.endpoint, "part").delivery.release()
    producer.payload("part")[MIB // 2] ^= 1
    with pytest.raises(DamagedError, match="came damaged: its checksum differs"):
        client.fetch(producer.endpoint, "part")
    assert not producer.is_held("part")
    producer.add("part", make_batch(MIB, 7))
    assert rows(client.fetch(producer.endpoint, "part")).equals(make_batch(MIB, 7))
    assert producer.num_decoded == 2


def test_a_whole_part_that_is_leased_again_is_not_decoded_again(make_producer: Any, make_client: Any, make_batch: Any) -> None:
    producer, client = make_producer(with_checksum=True), make_client()
    for _ in range(3):
        producer.add("part", make_batch(MIB, 7))
        client.fetch(producer.endpoint, "part").delivery.release()
    assert producer.num_decoded == 1
