"""Chunks packed by hand are protobuf messages like any other."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import rpc
from headrace.errors import UnavailableError
from headrace.transport.chunks import ChunkReceiver, decode, encode
from headrace.v1 import payload_pb2_grpc
from headrace.v1.payload_pb2 import FetchReply, FetchRequest, PartHeader


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 1 << 20, (1 << 21) + 5])
def test_a_chunk_has_the_wire_form_of_protobuf_and_comes_back(size: int) -> None:
    data = bytes(k % 251 for k in range(size))
    message = encode(memoryview(data))
    assert message == FetchReply(chunk=data).SerializeToString()
    chunk = decode(message)
    assert isinstance(chunk, memoryview)
    assert chunk == data


def test_a_header_comes_back() -> None:
    reply = FetchReply(header=PartHeader(num_bytes=5, arena="headrace-1-00", crc32=7))
    assert decode(encode(reply)) == reply


@settings(derandomize=True, deadline=None)
@given(st.binary(max_size=300), st.lists(st.binary(min_size=1, max_size=20), max_size=3))
def test_a_message_with_more_than_the_chunk_is_read_as_protobuf_reads_it(data: bytes, unknown: list[bytes]) -> None:
    message = FetchReply(chunk=data).SerializeToString()
    for value in unknown:
        message += b"\x7a" + bytes([len(value)]) + value  # field 15, which nobody knows
    chunk = decode(message)
    assert isinstance(chunk, memoryview)
    assert chunk == FetchReply.FromString(message).chunk


class OtherServer(payload_pb2_grpc.PayloadServicer):
    """Made with protobuf's own messages. The ticket says how many bytes it announces, and how many it sends."""

    def Fetch(self, request: FetchRequest, context: grpc.ServicerContext) -> Iterator[FetchReply]:  # noqa: N802
        announced, sent = map(int, request.ticket.split())
        yield FetchReply(header=PartHeader(num_bytes=announced))
        for start in range(0, sent, 4):
            yield FetchReply(chunk=bytes(range(start, min(start + 4, sent))))


@pytest.fixture
def receiver() -> Iterator[ChunkReceiver]:
    server = grpc.server(ThreadPoolExecutor(1))
    payload_pb2_grpc.add_PayloadServicer_to_server(OtherServer(), server)
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with rpc.channel(endpoint) as channel:
        yield ChunkReceiver(channel, endpoint)
    server.stop(0).wait()


@pytest.mark.parametrize("num_bytes", [0, 1, 4, 10])
def test_chunks_are_put_together_in_one_buffer(receiver: ChunkReceiver, num_bytes: int) -> None:
    assert receiver.fetch(f"{num_bytes} {num_bytes}", 10.0).buffer.to_pybytes() == bytes(range(num_bytes))


@pytest.mark.parametrize("sent", [0, 9, 11, 40])
def test_more_or_fewer_bytes_than_announced_are_no_part(receiver: ChunkReceiver, sent: int) -> None:
    with pytest.raises(UnavailableError, match=f"sent {sent} bytes of part .*, which has 10"):
        receiver.fetch(f"10 {sent}", 10.0)
