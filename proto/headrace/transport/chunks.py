"""Payload over the gRPC connection itself, in chunks.

The messages are `FetchReply` as payload.proto has it, but chunks are packed and unpacked by hand. A message object would copy
each of them twice more on either side, which halves the rate. Here the sender copies a chunk once, from the payload into the
message, and the receiver once, from the message into the buffer that takes the whole part.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Protocol

import grpc
import pyarrow as pa

from headrace import rpc
from headrace.errors import UnavailableError
from headrace.transport.base import GRPC, Delivery, Receiver
from headrace.v1 import payload_pb2

CHUNK_BYTES = 1 << 20  # the fastest size for grpcio streams
SERVICE = "headrace.v1.Payload"
_CHUNK_TAG = bytes([payload_pb2.FetchReply.CHUNK_FIELD_NUMBER << 3 | 2])  # a field of bytes, in protobuf's wire format

Reply = payload_pb2.FetchReply | memoryview
"""A header, or a chunk."""


class Servicer(Protocol):
    """The methods of Payload, as payload.proto describes them."""

    async def Offer(  # noqa: N802
        self, request: payload_pb2.OfferRequest, context: grpc.aio.ServicerContext
    ) -> payload_pb2.OfferReply: ...

    def Fetch(  # noqa: N802
        self, request: payload_pb2.FetchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Reply]: ...


def split(data: pa.Buffer) -> Iterator[memoryview]:
    """The payload as chunks: views, not copies."""
    view = memoryview(data)
    for start in range(0, len(view), CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]


class ChunkReceiver(Receiver):
    """Fetches parts over one channel, each into one buffer of its size."""

    def __init__(self, channel: grpc.Channel, endpoint: str) -> None:
        self._endpoint = endpoint
        self._fetch = channel.unary_stream(f"/{SERVICE}/Fetch", payload_pb2.FetchRequest.SerializeToString, decode)

    def fetch(self, ticket: str, timeout_s: float) -> Delivery:
        """See `base.Receiver`. The buffer is the consumer's own."""
        with rpc.translated(self._endpoint):
            try:
                replies = self._fetch(payload_pb2.FetchRequest(ticket=ticket), timeout=timeout_s)
            except ValueError as err:  # gRPC's word for a call on a closed channel: another thread found it broken
                raise UnavailableError(f"the connection to {self._endpoint} was closed") from err
            header = next(replies).header
            buffer = pa.allocate_buffer(header.num_bytes)  # of Arrow's pool, which reuses the pages of parts that are gone
            end = _join(replies, memoryview(buffer).cast("B"))
        if end != header.num_bytes:
            raise UnavailableError(f"{self._endpoint} sent {end} bytes of part {ticket}, which has {header.num_bytes}")
        return Delivery(header=header, buffer=buffer, transport=GRPC, release=_nothing)

    def close(self) -> None:
        """See `base.Receiver`. The channel is its owner's to close."""


def _join(chunks: Iterable[memoryview], buffer: memoryview) -> int:
    """Copy the chunks into the buffer, as far as they fit. How many bytes came."""
    end = 0
    for chunk in chunks:
        start, end = end, end + len(chunk)
        if end <= len(buffer):
            buffer[start:end] = chunk
    return end


def _nothing() -> None:
    """The buffer is the consumer's own and goes with its last reference."""


def encode(reply: Reply) -> bytes:
    """The wire form of a FetchReply."""
    if isinstance(reply, memoryview):
        return b"".join((_CHUNK_TAG, _varint(len(reply)), reply))
    message: bytes = reply.SerializeToString()
    return message


def decode(message: bytes) -> Reply:
    """The header, or a view of the chunk, in the wire form of a FetchReply."""
    if message[:1] == _CHUNK_TAG:
        length, start = _read_varint(message, 1)
        if start + length == len(message):
            return memoryview(message)[start:]
    reply = payload_pb2.FetchReply.FromString(message)
    return memoryview(reply.chunk) if reply.WhichOneof("reply") == "chunk" else reply


def add_service(server: grpc.aio.Server, servicer: Servicer) -> None:
    """Serve Payload by `servicer`, whose Fetch yields a header and then chunks."""
    handlers = {
        "Offer": grpc.unary_unary_rpc_method_handler(
            servicer.Offer, payload_pb2.OfferRequest.FromString, payload_pb2.OfferReply.SerializeToString
        ),
        "Fetch": grpc.unary_stream_rpc_method_handler(servicer.Fetch, payload_pb2.FetchRequest.FromString, encode),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; the top bit says that another follows: 300 is ac 02."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _read_varint(message: bytes, start: int) -> tuple[int, int]:
    """(number, index behind it). Of ten bytes at most, as the format has it."""
    number = 0
    for shift, byte in enumerate(message[start : start + 10]):
        number |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return number, start + shift + 1
    return number, len(message) + 1
