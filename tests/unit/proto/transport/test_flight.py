"""Payload over Arrow Flight: what is sent, who waits, who holds the part, and what breaks on the way."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from pyarrow import flight

from headrace.errors import EndpointError, NotFoundError, UnavailableError, UserError
from headrace.quarantine import Reason, Rejected
from headrace.transport import flight_server
from headrace.transport.base import DamagedError, Delivery, refusal_value
from headrace.transport.flight import HEADER, FlightReceiver
from headrace.transport.flight_server import BATCH_BYTES, FlightServer, split
from headrace.v1 import payload_pb2
from tests.examples import with_examples

MIB = 1 << 20
SOON_S = 0.4  # how soon a receiver of a test finds a wire stalled


@pytest.fixture
def make_receiver() -> Iterator[Callable[..., FlightReceiver]]:
    """(producer or port, **options) -> a FlightReceiver."""
    with ExitStack() as stack:

        def make(to: Any, **options: Any) -> FlightReceiver:
            receiver = FlightReceiver(f"127.0.0.1:{to if isinstance(to, int) else to.flight.port}", **options)
            stack.callback(receiver.close)
            return receiver

        yield make


def rows(delivery: Delivery) -> pa.RecordBatch:
    """All rows in one batch."""
    (batch,) = pa.Table.from_batches(delivery.batches).combine_chunks().to_batches()
    return batch


def wait_for_callers(producer: Any, ticket: str, count: int) -> None:
    """Until so many calls wait for a part, or send it."""
    for _ in range(2000):  # each asks the producer's loop: 20 s on a busy machine are no reason to fail
        if producer.num_waiting(ticket) == count:
            return
        threading.Event().wait(0.01)
    pytest.fail(f"{producer.num_waiting(ticket)} calls, not {count}")


# -- what is sent -----------------------------------------------------------------------------------------------------


@with_examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(0, 3000), max_size=40), max_bytes=st.integers(1, 4000))
def test_rows_are_put_together_in_order_to_batches_as_large_as_allowed(
    make_rows: Callable[..., pa.RecordBatch], sizes: list[int], max_bytes: int
) -> None:
    batch = make_rows(sizes, 100)
    pieces = list(split(batch, max_bytes))
    assert pa.Table.from_batches(pieces, batch.schema).combine_chunks().equals(pa.Table.from_batches([batch]).combine_chunks())
    num_bytes = [values_bytes(piece) for piece in pieces]
    assert all(piece.num_rows == 1 or size <= max_bytes for piece, size in zip(pieces, num_bytes, strict=True))
    following = [values_bytes(piece.slice(0, 1)) for piece in pieces[1:]]
    assert all(size + row > max_bytes for size, row in zip(num_bytes, following, strict=False)), (
        "no batch could have taken a row more"
    )


def values_bytes(batch: pa.RecordBatch) -> int:
    """Of all values, without the offsets of lists."""
    total = 0
    for column in batch.columns:
        while pa.types.is_nested(column.type):
            column = column.flatten()
        total += len(column) * column.type.bit_width // 8
    return total


def test_pieces_lie_where_the_part_lies(make_rows: Any) -> None:
    batch = make_rows([MIB] * 5)
    values = batch.column("patches").values.buffers()[1]
    pieces = [piece.column("patches").flatten() for piece in split(batch, MIB)]
    starts = [piece.buffers()[1].address + piece.offset for piece in pieces]
    assert starts == [
        values.address,
        values.address + MIB,
        values.address + 2 * MIB,
        values.address + 3 * MIB,
        values.address + 4 * MIB,
    ]


def test_a_large_part_comes_in_several_batches_and_a_large_sample_in_one(
    make_producer: Any, make_receiver: Any, make_rows: Any
) -> None:
    producer = make_producer(64 * MIB, with_checksum=True)
    sizes = [100, 3 * BATCH_BYTES, 5, 0, BATCH_BYTES // 2, BATCH_BYTES // 2, 7]
    producer.add("part", make_rows(sizes, 3))
    delivery = make_receiver(producer).fetch("part", 10.0)
    assert [batch.num_rows for batch in delivery.batches] == [1, 1, 3, 2], (
        "half a batch and the few bytes before do not fit twice"
    )
    assert rows(delivery).equals(make_rows(sizes, 3))
    assert all(batch.schema.metadata is None for batch in delivery.batches)


def test_what_was_damaged_when_it_was_decoded_is_told(make_producer: Any, make_receiver: Any, make_rows: Any) -> None:
    producer = make_producer()
    rejected = [Rejected(name=f"pets/shard/{n}", reason=Reason.CORRUPT_MEDIA, detail="ä" * 1000, sample_id=n) for n in range(5)]
    producer.add_stuck("part")
    producer.finish("part", make_rows([]), tuple(rejected))
    part = make_receiver(producer).fetch("part", 10.0)
    assert part.header.num_samples == 0
    assert sum(batch.num_rows for batch in part.batches) == 0
    assert [(item.name, item.detail) for item in part.header.rejections] == [(item.name, item.detail) for item in rejected]


def test_columns_that_are_not_asked_for_do_not_travel(
    make_producer: Any, make_client: Any, make_wire: Any, make_rows: Any
) -> None:
    producer = make_producer(64 * MIB, with_checksum=True)
    producer.add("part", make_rows([MIB] * 8, 3))
    wire = make_wire(producer)
    part = make_client("flight", columns=("sample_id", "input_ids", "labels")).fetch(producer.endpoint, "part")
    assert rows(part.delivery).equals(make_rows([MIB] * 8, 3).select(["sample_id", "input_ids", "labels"]))
    assert wire.num_bytes < MIB
    assert part.num_bytes < MIB


# -- who waits --------------------------------------------------------------------------------------------------------


def test_a_part_is_waited_for_while_it_is_decoded_by_asking_again(
    make_producer: Any, make_receiver: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_server, "WAIT_S", 0.02)
    producer, calls = make_producer(), []
    lend = producer.flight._server._lend
    producer.flight._server._lend = lambda request: calls.append(request) or lend(request)
    producer.add_stuck("part")
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(make_receiver(producer).fetch, "part", 20.0)
        while len(calls) < 3:
            assert not fetching.done()
        producer.finish("part", make_batch(MIB, 7))
        assert rows(fetching.result(timeout=20)).equals(make_batch(MIB, 7))


def test_more_clients_than_threads_come_to_their_turn(
    make_producer: Any, make_receiver: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_server, "WAIT_S", 0.02)
    monkeypatch.setattr(flight_server, "MAX_CALLS", 2)
    producer = make_producer(64 * MIB)
    receivers = [make_receiver(producer) for _ in range(6)]
    for number in range(6):
        producer.add_stuck(str(number))
    with ThreadPoolExecutor(6) as pool:
        fetching = [pool.submit(receiver.fetch, str(number), 20.0) for number, receiver in enumerate(receivers)]
        for number in reversed(range(6)):
            producer.finish(str(number), make_batch(1000, number))
        assert [rows(future.result(timeout=20)).column("sample_id")[0].as_py() for future in fetching] == list(range(6))


def test_a_part_that_is_not_decoded_in_time_is_unavailable(
    make_producer: Any, make_receiver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_server, "WAIT_S", 0.02)
    producer = make_producer()
    producer.add_stuck("part")
    with pytest.raises(UnavailableError, match="part did not come within"):
        make_receiver(producer).fetch("part", 0.1)
    wait_for_callers(producer, "part", 0)


def test_a_part_that_is_released_while_it_is_awaited_is_not_found(make_producer: Any, make_receiver: Any) -> None:
    producer = make_producer()
    producer.add_stuck("part")
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(make_receiver(producer).fetch, "part", 20.0)
        wait_for_callers(producer, "part", 1)
        producer.commit(0)
        with pytest.raises(NotFoundError, match="is held here no longer"):
            fetching.result(timeout=20)


def test_a_server_that_stops_ends_the_waits_and_frees_its_port(make_producer: Any, make_receiver: Any, make_batch: Any) -> None:
    former = make_producer()
    former.add_stuck("part")
    receiver = make_receiver(former)
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(receiver.fetch, "part", 20.0)
        wait_for_callers(former, "part", 1)
        former.stop()
        with pytest.raises(UnavailableError):
            fetching.result(timeout=20)
    with socket.create_server(("127.0.0.1", former.flight.port)):
        pass


async def test_a_port_that_is_taken_is_an_endpoint_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(EndpointError, match=f"cannot listen on {listen}"):
            FlightServer(listen, lambda request: pytest.fail("nobody asks"))


# -- who holds the part -----------------------------------------------------------------------------------------------


def open_stream(producer: Any, ticket: str, timeout_s: float) -> flight.FlightStreamReader:
    """A part of which nothing is read yet but the schema, by a client that takes 64 KiB ahead of its reader."""
    client = flight.connect(f"grpc://{producer.flight_endpoint}", generic_options=[("grpc.http2.bdp_probe", 0)])
    request = payload_pb2.FetchRequest(ticket=ticket).SerializeToString()
    return client.do_get(flight.Ticket(request), flight.FlightCallOptions(timeout=timeout_s))


def test_a_part_that_is_being_sent_stays_though_it_is_released_and_its_room_is_wanted(
    make_producer: Any, make_receiver: Any, make_rows: Any, make_batch: Any
) -> None:
    producer = make_producer(64 * MIB)
    receiver = make_receiver(producer)
    sizes = [MIB] * 32
    producer.add("sent", make_rows(sizes, 3))
    reader = open_stream(producer, "sent", 60.0)
    wait_for_callers(producer, "sent", 1)
    producer.commit(0)
    for step in range(1, 50):
        producer.add(str(step), make_batch(MIB, step), step=step)
        receiver.fetch(str(step), 10.0)
        producer.commit(step)
    assert producer.call(lambda: producer.store.held_bytes) > 32 * MIB
    table = reader.to_reader().read_all()
    assert table.combine_chunks().equals(pa.Table.from_batches([make_rows(sizes, 3)]).combine_chunks())
    del table, reader
    while producer.call(lambda: producer.store.held_bytes):
        pass


@pytest.mark.slow
def test_a_receiver_that_stops_reading_is_sent_no_more_and_holds_the_part_no_longer_than_its_deadline(
    make_producer: Any, make_rows: Any
) -> None:
    producer = make_producer(128 * MIB)
    producer.add("part", make_rows([MIB] * 64))
    reader = open_stream(producer, "part", 5.0)
    assert reader.read_chunk().data.num_rows > 0
    wait_for_callers(producer, "part", 1)
    wait_for_callers(producer, "part", 0)
    with pytest.raises((pa.ArrowException, OSError), match=r"[Dd]eadline|timeout"):
        reader.to_reader().read_all()


def test_a_killed_receiver_holds_nothing(make_producer: Any, make_rows: Any, spawn: Any) -> None:
    producer = make_producer(128 * MIB)
    producer.add("part", make_rows([MIB] * 64))
    reader, (said,) = spawn("read", producer.flight_endpoint, "part")
    assert said == "reading"
    wait_for_callers(producer, "part", 1)
    reader.send_signal(signal.SIGKILL)
    reader.wait()
    wait_for_callers(producer, "part", 0)


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_bytes", [0, 100, 3 * MIB])
@pytest.mark.parametrize("fault", ["cut_after_bytes", "stall_after_bytes"])
def test_a_wire_that_breaks_is_told_holds_nothing_and_the_part_comes_another_way(
    make_producer: Any, make_receiver: Any, make_wire: Any, make_rows: Any, fault: str, after_bytes: int
) -> None:
    producer = make_producer(64 * MIB)
    producer.add("part", make_rows([MIB] * 12, 7))
    wire = make_wire(producer, **{fault: after_bytes})
    with pytest.raises(UnavailableError, match=f"127.0.0.1:{wire.port} does not answer"):
        make_receiver(wire.port, stall_s=SOON_S).fetch("part", 60.0)
    wait_for_callers(producer, "part", 0)
    assert rows(make_receiver(producer).fetch("part", 10.0)).equals(make_rows([MIB] * 12, 7))


def test_closing_ends_a_transfer_that_is_under_way(
    make_producer: Any, make_receiver: Any, make_wire: Any, make_rows: Any
) -> None:
    producer = make_producer(64 * MIB)
    producer.add("part", make_rows([MIB] * 12))
    wire = make_wire(producer, stall_after_bytes=3 * MIB)
    receiver = make_receiver(wire.port, stall_s=60.0)
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(receiver.fetch, "part", 60.0)
        while wire.num_bytes <= 3 * MIB:
            assert not fetching.done()
        receiver.close()
        with pytest.raises(UnavailableError):
            fetching.result(timeout=20)
    with pytest.raises(UnavailableError, match="was closed"):
        receiver.fetch("part", 10.0)


@pytest.mark.parametrize("where", ["values", "ids"])
def test_a_part_that_is_damaged_on_the_wire_is_told_and_fetched_again_over_the_same_connection(
    make_producer: Any, make_client: Any, make_wire: Any, make_batch: Any, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    producer, client = make_producer(with_checksum=True), make_client("flight")
    producer.add("part", make_batch(MIB, 7))
    pattern = {"values": bytes([7]) * 1000, "ids": np.array([5, 6], np.int32).tobytes()}
    make_wire(producer, flips=pattern[where])
    with caplog.at_level(logging.INFO):
        with pytest.raises(UnavailableError, match="came damaged: its checksum differs"):
            client.fetch(producer.endpoint, "part")
        assert rows(client.fetch(producer.endpoint, "part").delivery).equals(make_batch(MIB, 7))
    assert caplog.text.count("receiving endpoint=") == 1


def test_lengths_that_lead_out_of_the_values_are_told_without_a_checksum_too(
    make_producer: Any, make_receiver: Any, make_wire: Any, make_rows: Any
) -> None:
    producer = make_producer()
    producer.add("part", make_rows([MIB, 5, 5], 7))
    wire = make_wire(producer, flips=np.array([3, 6], np.int32).tobytes())
    with pytest.raises(DamagedError, match=r"came damaged \(Column 1: .*[Oo]ffset"):
        make_receiver(wire.port).fetch("part", 10.0)


def test_a_part_that_is_damaged_in_the_store_is_not_sent_and_decoded_again_when_it_is_leased_again(
    make_producer: Any, make_client: Any, make_batch: Any
) -> None:
    producer, client = make_producer(with_checksum=True), make_client("flight")
    producer.add("part", make_batch(MIB, 7))
    client.fetch(producer.endpoint, "part")
    producer.payload("part")[MIB // 2] ^= 1
    with pytest.raises(NotFoundError, match="damaged where it is held"):
        client.fetch(producer.endpoint, "part")
    wait_for_callers(producer, "part", 0)
    producer.add("part", make_batch(MIB, 7))
    assert rows(client.fetch(producer.endpoint, "part").delivery).equals(make_batch(MIB, 7))
    assert producer.num_decoded == 2


class Incomplete(flight.FlightServerBase):
    """A Flight server that announces three samples, or nothing, and sends one."""

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.RecordBatchStream:
        request = payload_pb2.FetchRequest.FromString(ticket.ticket)
        header = payload_pb2.PartHeader(num_samples=3).SerializeToString()
        metadata = {HEADER: header} if request.ticket == "part" else None
        return flight.RecordBatchStream(pa.table({"sample_id": [1]}).replace_schema_metadata(metadata))


def test_another_flight_server_is_not_taken_for_a_preprocessor_s_nor_some_samples_for_all(make_receiver: Any) -> None:
    with Incomplete("grpc://127.0.0.1:0") as server:
        receiver = make_receiver(server.port)
        with pytest.raises(EndpointError, match="is not a preprocessor's Flight server"):
            receiver.fetch("other", 10.0)
        with pytest.raises(DamagedError, match="sent 1 samples of part part, which has 3"):
            receiver.fetch("part", 10.0)


def test_what_is_no_request_is_refused_as_such(make_producer: Any) -> None:
    client = flight.connect(f"grpc://{make_producer().flight_endpoint}")
    with pytest.raises(flight.FlightServerError) as caught:
        client.do_get(flight.Ticket(b"\xff\xff"))
    error = refusal_value(payload_pb2.Refusal.FromString(caught.value.extra_info))
    assert type(error) is UserError
    assert str(error) == "the Flight ticket is no FetchRequest: is the peer Headrace's?"
