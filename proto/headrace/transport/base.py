"""The contract of every transport: who owns the bytes of a part, and for how long.

The producer, a preprocessor, offers: it names what it has beside gRPC, an arena in shared memory or nothing. Through the arena
it hands parts only to a client that has read the arena, which the token in it proves. Chunks over the gRPC connection need no
proof, and are what is left where another transport is not possible or has no room. A part does not change while the producer
is handing it over, and after that as long as its consumer holds it.

The consumer, a rank, gets a `Delivery`. Its buffer is read-only, belongs to the producer or to the consumer, as the transport
has it, and holds the part until `release`. Who calls `release` promises that nothing reads the buffer or a view of it any
more: no Arrow array, no tensor. A consumer that dies has released everything. A producer that dies takes nothing away: what
was delivered stays readable.

Which transport a connection has is chosen at the first part and logged once; every delivery says how it came.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from headrace.v1 import payload_pb2

SHARED_MEMORY = "shared_memory"
GRPC = "grpc"
TRANSPORTS = (SHARED_MEMORY, GRPC)  # the best one first


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """The bytes of one part, as a consumer has them until it calls `release`."""

    header: payload_pb2.PartHeader
    buffer: pa.Buffer
    """An Arrow IPC stream. Do not write into it."""
    transport: str
    release: Callable[[], None]
    """Gives the bytes back: no view of them is read from then on. From any thread; once is enough, more do no harm. It keeps
    no reference to the buffer."""


class Receiver(Protocol):
    """The consumer's end of one transport to one preprocessor. Any thread may call it. Deliveries outlive it."""

    def fetch(self, ticket: str, timeout_s: float) -> Delivery | None:
        """The part, as soon as it is decoded. None where it comes by another transport only.

        Raises NotFoundError where it is not held there, UnavailableError where it does not come, whole and within the time.
        """

    def close(self) -> None:
        """Fetch nothing more."""


def checksum(data: pa.Buffer) -> int:
    """CRC-32 of the bytes. Other threads run meanwhile."""
    return zlib.crc32(data)
