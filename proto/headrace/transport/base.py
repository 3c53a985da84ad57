"""The contract of every transport: who owns the bytes of a part, and for how long.

The producer, a preprocessor, offers: it names what it has beside gRPC, an arena in shared memory and a Flight server. Through
the arena it hands parts only to a client that has read the arena, which the token in it proves. Flight needs no proof, and is
what is left where another transport is not possible or has no room. A part does not change while the producer is handing it
over, and after that as long as its consumer holds it.

The consumer, a rank, gets a `Delivery`. Its payload is read-only, belongs to the producer or to the consumer, as the transport
has it, and holds the part until `release`. Who calls `release` promises that nothing reads the payload or a view of it any
more: no Arrow array, no tensor. A consumer that dies has released everything. A producer that dies takes nothing away: what
was delivered stays readable.

Which transport a connection has is chosen at the first part and logged once; every delivery says how it came.
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
TRANSPORTS = (SHARED_MEMORY, UCX, FLIGHT)  # the best one first


class TransportError(HeadraceError):
    """A transport cannot be used with this preprocessor, or no longer; another one may. The message says why."""


class DamagedError(UnavailableError):
    """A part came, but not as it was sent. The connection is fine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One part, as a consumer has it until it calls `release`: whole, as bytes, or some of its columns, as batches."""

    header: payload_pb2.PartHeader
    buffer: pa.Buffer | None = None
    """An Arrow IPC stream, where the transport carries bytes. `header.crc32` is not compared yet. Do not write into it."""
    batches: tuple[pa.RecordBatch, ...] = ()
    """The rows in order with the columns asked for, where it carries batches: compared and valid. Do not write into them."""
    transport: str
    release: Callable[[], None]
    """Gives the payload back: no view of it is read from then on. From any thread; once is enough, more do no harm. It keeps
    no reference to the payload."""


class Receiver(Protocol):
    """The consumer's end of one transport to one preprocessor. Any thread may call it. Deliveries outlive it."""

    def fetch(self, ticket: str, timeout_s: float) -> Delivery | None:
        """The part, as soon as it is decoded. None where it comes by another transport only.

        Raises NotFoundError or PermissionDeniedError where it is refused, UnavailableError where it does not come, whole and
        within the time, TransportError where this transport is no longer of use.
        """

    def close(self) -> None:
        """Fetch nothing more. Threads that wait for a part raise UnavailableError within a second."""


def read_batches(data: pa.Buffer, columns: Sequence[str] = ()) -> tuple[pa.RecordBatch, ...]:
    """The batches of an Arrow IPC stream, with all columns or those named, in the schema's order. Not copied."""
    with pa.ipc.open_stream(data) as reader:
        names = [name for name in reader.schema.names if not columns or name in columns]
        return tuple(batch.select(names) for batch in reader)


def checksum(data: pa.Buffer) -> int:
    """CRC-32 of the bytes. Other threads run meanwhile."""
    return zlib.crc32(data)


def verify(header: payload_pb2.PartHeader, found: Callable[[], int], what: str) -> None:
    """Raises DamagedError where the header has a checksum and the one found differs. `what`: the part, and where it came from."""
    if header.HasField("crc32") and header.crc32 != found():
        raise DamagedError(f"{what} came damaged: its checksum differs")


def refusal_message(error: HeadraceError) -> payload_pb2.Refusal:
    """An error that keeps its meaning on any wire."""
    return payload_pb2.Refusal(status=status_of(error).name, message=str(error))


def refusal_value(message: payload_pb2.Refusal) -> HeadraceError:
    """The error that a peer refused with."""
    status = grpc.StatusCode.__members__.get(message.status, grpc.StatusCode.UNKNOWN)
    return ERROR_OF.get(status, HeadraceError)(message.message)
