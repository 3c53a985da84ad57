"""UCX connections: who is let in, what is not believed, which columns come, and what happens without UCX."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headrace.errors import NotFoundError
from headrace.transport import ucx_library
from headrace.transport.base import checksum, read_batches, verify
from headrace.transport.flight_server import Loan
from headrace.transport.ucx import UcxClient, UcxReceiver
from headrace.transport.ucx_buffers import ReceiveBuffers
from headrace.transport.ucx_connection import HELLO, Connection, Kind, Role
from headrace.transport.ucx_library import UcxError
from headrace.transport.ucx_loop import UcxLoop
from headrace.transport.ucx_server import MAX_ASKED, UcxServer
from headrace.v1 import payload_pb2
from tests.unit.proto.transport.ucx_world import PART, Lender, connect, loan, on_loop, payload

# -- connecting -------------------------------------------------------------------------------------------------------


def test_another_process_at_the_port_is_noticed(ucx: UcxLoop, server: UcxServer) -> None:
    with pytest.raises(UcxError, match="another process than the preprocessor answers"):
        UcxReceiver(ucx, "127.0.0.1", server.port, bytes(16), ReceiveBuffers())


def test_nobody_at_the_port_is_noticed_at_once(ucx: UcxLoop) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(UcxError, match="cannot be reached by UCX"):
            UcxReceiver(ucx, "127.0.0.1", free.getsockname()[1], b"token", ReceiveBuffers())


def test_who_does_not_speak_ucx_is_given_up_after_the_time_limit(ucx: UcxLoop) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(UcxError, match=r"does not answer by UCX within 0\.2 s"):
        UcxReceiver(ucx, "127.0.0.1", silent.getsockname()[1], b"token", ReceiveBuffers(), connect_timeout_s=0.2)


def test_a_host_without_an_address_is_named(ucx: UcxLoop) -> None:
    with pytest.raises(UcxError, match=r"nowhere\.invalid has no address"):
        UcxReceiver(ucx, "nowhere.invalid", 1, b"token", ReceiveBuffers())


def test_receivers_of_one_client_share_its_memory_and_end_with_it(server: UcxServer) -> None:
    allocated: list[int] = []

    def allocate(num_bytes: int) -> memoryview:
        allocated.append(num_bytes)
        return memoryview(bytearray(num_bytes))

    client = UcxClient(allocate)
    receivers = [client.connect("localhost", server.port, server.token) for _ in range(3)]
    for receiver in receivers:
        receiver.fetch("part", 20).release()
    last = receivers[0].fetch("part", 20)
    client.close()
    client.close()
    assert allocated == [PART.size]
    assert payload(last).equals(PART)
    with pytest.raises(UcxError):
        receivers[0].fetch("part", 20)
    with pytest.raises(UcxError, match="is closed"):
        client.connect("localhost", server.port, server.token)


def test_where_memory_is_short_the_connection_ends_and_the_thread_does_not(ucx: UcxLoop, server: UcxServer) -> None:
    def allocate(num_bytes: int) -> memoryview:
        raise MemoryError

    with pytest.raises(UcxError, match="there is no memory for a part of 3145728 bytes"):
        connect(ucx, server, ReceiveBuffers(allocate)).fetch("part", 20)
    assert payload(connect(ucx, server).fetch("part", 20)).equals(PART)


# -- what is not believed ---------------------------------------------------------------------------------------------


def question(kind: int, number: int, body: bytes = b"") -> bytes:
    return struct.pack("<BQ", kind, number) + body


@pytest.mark.parametrize(
    "questions",
    [
        [b"?"],
        [question(99, 0)],
        [question(Kind.PART, 1)],
        [question(Kind.ASK, 1 << 63, b"\n\x05stuck")],
        [question(Kind.ASK, 1, bytes(2 << 20))],
        [question(Kind.ASK, 1, b"\xff\xff\xff")],
        [question(Kind.ASK, k, b"\n\x05stuck") for k in range(MAX_ASKED + 1)],
        [question(Kind.ASK, 5, b"\n\x05stuck")] * 2,
    ],
    ids=["short", "unknown kind", "of the other side", "number", "huge", "no message", "too many", "twice the same"],
)
def test_who_sends_nonsense_is_cut_off_and_nobody_else(ucx: UcxLoop, server: UcxServer, questions: list[bytes]) -> None:
    lost: Future[str | None] = Future()
    receiver = connect(ucx, server)

    def talk() -> None:
        endpoint = ucx.worker.create_endpoint_from_hostname("127.0.0.1", server.port, True)
        connection = Connection(ucx, endpoint, lambda connection: lost.set_result(connection.lost))

        def greeted(greeting: Any) -> None:
            for data in questions:
                connection.send(Role.QUESTION, HELLO.unpack(greeting)[2], data)

        connection.await_greeting(greeted)

    on_loop(ucx, talk)
    assert "reset" in str(lost.result(timeout=20))
    assert payload(receiver.fetch("part", 20)).equals(PART)


# -- columns ----------------------------------------------------------------------------------------------------------

COLUMNS = pa.record_batch({"a": pa.array(np.arange(9)), "b": pa.array([b"x" * 1000] * 9)})


def lend_columns(lender: Lender, crc32: int | None, data: pa.Buffer) -> None:
    async def lend() -> Loan:
        return Loan(header=payload_pb2.PartHeader(crc32=crc32), data=data)

    lender.scripts["columns"] = lend


def written(batch: pa.RecordBatch) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


@pytest.mark.parametrize("with_checksum", [False, True])
@pytest.mark.parametrize(("columns", "are_all_sent"), [((), True), (("a",), False), (("b",), True), (("a", "b"), True)])
def test_a_rank_gets_its_columns(
    ucx: UcxLoop, lender: Lender, columns: tuple[str, ...], are_all_sent: bool, with_checksum: bool
) -> None:
    data = written(COLUMNS)
    lend_columns(lender, checksum(data) if with_checksum else None, data)
    delivery = connect(ucx, lender.server, columns=columns).fetch("columns", 20)
    (found,) = read_batches(payload(delivery), columns)
    assert found.equals(COLUMNS.select(list(columns) or ["a", "b"]))
    assert payload(delivery).equals(data) == are_all_sent
    assert payload(delivery).size < 1000 or are_all_sent
    assert delivery.header.HasField("crc32") == with_checksum
    verify(delivery.header, lambda: checksum(payload(delivery)), "the part")


def test_a_part_that_is_damaged_where_it_lies_is_not_copied_from(ucx: UcxLoop, lender: Lender) -> None:
    data = written(COLUMNS)
    lend_columns(lender, checksum(data) ^ 1, data)
    with pytest.raises(NotFoundError, match="damaged where it is held"):
        connect(ucx, lender.server, columns=("a",)).fetch("columns", 20)


# -- without UCX ------------------------------------------------------------------------------------------------------


@pytest.fixture
def not_loaded() -> Iterator[None]:
    ucx_library.load.cache_clear()
    yield
    ucx_library.load.cache_clear()


@pytest.mark.usefixtures("not_loaded")
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucxx", None)
    with pytest.raises(UcxError, match="ucxx, the extra `rdma`, is not usable"):
        UcxLoop("ucx-none")
    with pytest.raises(UcxError, match="`rdma`"):
        asyncio.run(UcxServer(lambda _: contextlib.nullcontext(loan(PART))).start())


def test_options_of_the_user_count(monkeypatch: pytest.MonkeyPatch, server: UcxServer) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    with contextlib.closing(UcxLoop("ucx-lo")) as loop:
        assert connect(loop, server).lanes == ("tcp/lo",)
    monkeypatch.setenv("UCX_TLS", "none-such")
    with pytest.raises(UcxError, match="UCX does not start"):
        UcxLoop("ucx-none")


def test_the_environment_is_left_as_it_was_found() -> None:
    program = (
        "import os; found = dict(os.environ); import headrace.transport.ucx_loop as u; u.UcxLoop('u'); assert os.environ == found"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
