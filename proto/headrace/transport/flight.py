"""Payload over the network: Arrow Flight, as a rank receives it. `headrace.transport.flight_server` is the other end.

A Flight ticket is a serialised FetchRequest, and the reply a stream of record batches of about a MiB each: rows of the part,
sliced where they lie. The loop that sends them, and the one that receives them, run in C++ without Python's lock. The part's
header travels in the schema's metadata.

What does not come is a Flight error with a Refusal in its extra_info. A part that is still being decoded is waited for in steps:
after a second the server answers that the time is over, and the client asks again. So no thread of the server waits for a client
that went, and a client notices within seconds that a preprocessor, or the wire, is dead.

The checksum, where there is one, covers the columns sent: their values and the lengths of their lists. Before that the server
compares the part in its memory with the checksum of when it was decoded.
"""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from pyarrow import flight

from headrace.errors import EndpointError, UnavailableError
from headrace.ticket import part_of
from headrace.transport.base import FLIGHT, DamagedError, Delivery, Receiver, refusal_value, verify
from headrace.transport.malloc import keep_freed_pages
from headrace.v1 import payload_pb2

STALL_S = 5.0  # a wire from which nothing comes while a part is on its way is given up after this time
PAUSE_S = 0.05  # before a client asks again where the server had no thread for it
HEADER = b"headrace.part"  # in the schema's metadata


class FlightReceiver(Receiver):
    """Fetches parts from one preprocessor's Flight server. Calls of several threads share its connection."""

    def __init__(self, endpoint: str, *, columns: Sequence[str] = (), ca: bytes | None = None, stall_s: float = STALL_S) -> None:
        """`endpoint`: HOST:PORT. `columns`: those to fetch; none: all. `ca`: of its certificate, in PEM; None: no TLS.

        Connects at the first part. Tunes malloc (`headrace.transport.malloc`).
        """
        keep_freed_pages()
        self._endpoint = endpoint
        self._columns = tuple(columns)
        self._client = flight.connect(
            location(endpoint, tls=ca is not None), tls_root_certs=ca, generic_options=_options(int(1000 * stall_s))
        )
        self._closed = threading.Event()
        self._readers: set[flight.FlightStreamReader] = set()
        self._lock = threading.Lock()  # of the readers

    def fetch(self, ticket: str, timeout_s: float) -> Delivery:
        """See `base.Receiver`. The batches are the consumer's own: their memory goes with the last reference to them."""
        request = flight.Ticket(payload_pb2.FetchRequest(ticket=ticket, columns=self._columns).SerializeToString())
        deadline = time.monotonic() + timeout_s
        while not self._closed.is_set() and (asked := time.monotonic()) < deadline:
            try:
                with self._translated():
                    header, table = self._receive(request, deadline - asked)
                return self._delivery(header, table, ticket)
            except flight.FlightTimedOutError:
                if time.monotonic() < asked + PAUSE_S:
                    self._closed.wait(PAUSE_S)
        self._check_open()
        raise UnavailableError(f"part {part_of(ticket)} did not come within {timeout_s:.0f} s")

    def close(self) -> None:
        """See `base.Receiver`."""
        self._closed.set()
        with self._lock:
            for reader in self._readers:
                reader.cancel()

    def _receive(self, request: flight.Ticket, timeout_s: float) -> tuple[payload_pb2.PartHeader, pa.Table]:
        reader = self._client.do_get(request, flight.FlightCallOptions(timeout=timeout_s))
        header = (reader.schema.metadata or {}).get(HEADER)
        if header is None:
            raise EndpointError(f"{self._endpoint} answers, but is not a preprocessor's Flight server")
        with self._cancellable(reader):
            table = reader.to_reader().read_all()  # in C++; the reader's own read_all takes a cancelled call for Ctrl-C
        return payload_pb2.PartHeader.FromString(header), table

    def _delivery(self, header: payload_pb2.PartHeader, table: pa.Table, ticket: str) -> Delivery:
        if table.num_rows != header.num_samples:
            raise DamagedError(
                f"{self._endpoint} sent {table.num_rows} samples of part {part_of(ticket)}, which has {header.num_samples}"
            )
        try:
            table.validate(full=True)  # offsets that lead out of their buffer would crash whoever reads it
        except pa.ArrowInvalid as err:
            raise DamagedError(f"part {part_of(ticket)} of {self._endpoint} came damaged ({err})") from err
        batches = tuple(table.replace_schema_metadata(None).to_batches())
        verify(header, lambda: values_checksum(batches), f"part {part_of(ticket)} of {self._endpoint}")
        return Delivery(header=header, batches=batches, transport=FLIGHT, release=_nothing)

    @contextlib.contextmanager
    def _cancellable(self, reader: flight.FlightStreamReader) -> Iterator[None]:
        """`close` ends the reading."""
        with self._lock:
            self._check_open()
            self._readers.add(reader)
        try:
            yield
        finally:
            with self._lock:
                self._readers.discard(reader)

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise UnavailableError(f"the connection to {self._endpoint} was closed")

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """What Arrow raises becomes what the server raised, or UnavailableError: the wire breaks in many ways."""
        try:
            yield
        except flight.FlightTimedOutError:
            raise
        except (pa.ArrowException, OSError, DecodeError) as err:
            if info := getattr(err, "extra_info", None):
                raise refusal_value(payload_pb2.Refusal.FromString(info)) from err
            text = str(err).partition(". gRPC client debug context")[0]
            raise UnavailableError(f"{self._endpoint} does not answer ({text})") from err


def values_checksum(batches: Iterable[pa.RecordBatch]) -> int:
    """CRC-32 of the lengths of all lists and of all values, column by column of one batch after the other."""
    crc = 0
    for batch in batches:
        for column in batch.columns:
            while pa.types.is_nested(column.type):
                if not pa.types.is_fixed_size_list(column.type):
                    crc = zlib.crc32(column.value_lengths().to_numpy(), crc)
                column = column.flatten()  # of the slice only
            crc = zlib.crc32(column.to_numpy(), crc)
    return crc


def location(endpoint: str, *, tls: bool) -> str:
    """The endpoint as Flight writes it."""
    return f"{'grpc+tls' if tls else 'grpc'}://{endpoint}"


def _options(stall_ms: int) -> list[tuple[str, int]]:
    """Of the channel."""
    return [
        ("grpc.keepalive_time_ms", stall_ms // 2),
        ("grpc.keepalive_timeout_ms", stall_ms // 2),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.ping_timeout_ms", stall_ms),  # of the pings that measure the bandwidth: they keep back those of keepalive
        ("grpc.min_reconnect_backoff_ms", stall_ms),  # also the time that a connection may take
        ("grpc.use_local_subchannel_pool", 1),  # a new receiver does not inherit a broken connection
    ]


def _nothing() -> None:
    """There is nothing to give back."""
