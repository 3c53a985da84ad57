"""The contract of every transport: who owns the bytes of a part, and for how long.

The producer, a preprocessor, offers its transports over gRPC: an arena in shared memory, a UCX server and a Flight server.
Through the arena it hands parts only to a client that has read the arena, which the token in it proves. Flight needs no such
proof, and is the fallback if another transport is not possible or has no room. A part does not change while the producer hands
it over, nor afterwards while its consumer holds it.

The consumer, a rank, gets a `Delivery`. Its payload is read-only, belongs to the producer or the consumer, depending on the
transport, and stays valid until `release`. Whoever calls `release` promises that nothing reads the payload or a view of it any
more: no Arrow array, no tensor. A consumer that dies thereby releases everything. A producer that dies takes nothing away:
delivered payload stays readable.

The transport of a connection is chosen at the first part and logged once; every delivery says how it came.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc
import pyarrow as pa

from headrace.errors import ERROR_OF, HeadraceError, UnavailableError, status_of
from headrace.v1 import payload_pb2

SHARED_MEMORY = "shared_memory"
UCX = "ucx"
FLIGHT = "flight"
TRANSPORTS = (SHARED_MEMORY, UCX, FLIGHT)  # in order of preference


class TransportError(HeadraceError):
    """A transport cannot be used with a preprocessor, or no longer, though another transport may. The message says why."""


class DamagedError(UnavailableError):
    """A part arrived damaged: it differs from what was sent. The connection is fine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One received part, which its consumer holds until it calls `release`: either bytes in `buffer`, or the columns asked for in
    `batches`."""

    header: payload_pb2.PartHeader
    buffer: pa.Buffer | None = None
    """The part as an Arrow IPC stream, if the transport carries bytes; its checksum is not verified yet. Do not write into it."""
    batches: tuple[pa.RecordBatch, ...] = ()
    """The part's rows in order, with the columns asked for, if the transport carries batches; they are validated, and verified
    against the checksum. Do not write into them."""
    transport: str
    """How the part came: one of TRANSPORTS, for UCX with the transports of its lanes appended."""
    release: Callable[[], None]
    """Gives the payload back; no view of it may be read afterwards. It may be called from any thread and more than once, and
    keeps no reference to the payload."""


class Receiver(Protocol):
    """The consumer's end of one transport to one preprocessor. Thread-safe. Deliveries outlive it."""

    def fetch(self, ticket: str, timeout_s: float) -> Delivery | None:
        """Wait until the part of a ticket is decoded and return it; None if it can be had by another transport only.

        Raises NotFoundError or PermissionDeniedError if the part is refused, UnavailableError if it does not arrive whole within
        `timeout_s`, and TransportError if this transport can no longer be used.
        """

    def close(self) -> None:
        """Close the connection. Threads that wait for a part in `fetch` raise UnavailableError within a second."""


def read_batches(data: pa.Buffer, columns: Sequence[str] = ()) -> tuple[pa.RecordBatch, ...]:
    """Return the batches of an Arrow IPC stream, without copying, with all columns or those named, in the schema's order."""
    with pa.ipc.open_stream(data) as reader:
        names = [name for name in reader.schema.names if not columns or name in columns]
        return tuple(batch.select(names) for batch in reader)


def checksum(data: pa.Buffer) -> int:
    """Return the CRC-32 of the bytes. Releases the interpreter lock."""
    return zlib.crc32(data)


def verify(header: payload_pb2.PartHeader, found: Callable[[], int], what: str) -> None:
    """Raise DamagedError if the header has a checksum and it differs from `found()`, the checksum of what arrived.

    `what`: the part and its origin, for the message. Without a checksum in the header `found` is not called.
    """
    if header.HasField("crc32") and header.crc32 != found():
        raise DamagedError(f"{what} came damaged: its checksum differs")


def refusal_message(error: HeadraceError) -> payload_pb2.Refusal:
    """Return the message that carries an error to a peer; `refusal_value` turns it back into the error."""
    return payload_pb2.Refusal(status=status_of(error).name, message=str(error))


def refusal_value(message: payload_pb2.Refusal) -> HeadraceError:
    """Return the error in a peer's refusal; a HeadraceError if its status is not known here."""
    status = grpc.StatusCode.__members__.get(message.status, grpc.StatusCode.UNKNOWN)
    return ERROR_OF.get(status, HeadraceError)(message.message)
