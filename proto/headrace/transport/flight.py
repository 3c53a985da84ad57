"""Payload over the network by Arrow Flight: the protocol and the rank's end (the other: `headrace.transport.flight_server`).

A Flight ticket is a serialised FetchRequest, and the reply is a stream of record batches of up to 4 MiB each: rows of the part,
sliced without a copy. The loops that send and receive them run in C++ without Python's lock. The part's header travels in the
schema's metadata.

A part that is refused comes as a Flight error with a Refusal in its extra_info. A client waits for a part that is still being
decoded in steps: after a second the server answers with a timeout, and the client asks again. So no thread of the server waits
for a client that is gone, and a client notices within seconds that a preprocessor, or the connection, is dead.

The checksum, if the preprocessor has one, covers the columns sent: their values and the lengths of their lists. Before computing
it, the server verifies the part in its memory against the checksum from when the part was decoded.
"""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from pyarrow import flight

from headrace.errors import EndpointError, UnavailableError
from headrace.identity import PREPROCESSOR, Papers
from headrace.ticket import part_of
from headrace.transport.base import FLIGHT, DamagedError, Delivery, Receiver, refusal_value, verify
from headrace.transport.malloc import keep_freed_pages
from headrace.v1 import payload_pb2

STALL_S = 5.0  # a connection that brings nothing for this long while a part is on its way is given up
PAUSE_S = 0.05  # how long a client waits before it asks again when the server had no free thread
HEADER = b"headrace.part"  # key of the part's header in the schema's metadata


class FlightReceiver(Receiver):
    """A receiver that fetches parts from one preprocessor's Flight server. Calls of several threads share its connection."""

    def __init__(
        self, endpoint: str, *, columns: Sequence[str] = (), papers: Papers | None = None, stall_s: float = STALL_S
    ) -> None:
        """`endpoint`: HOST:PORT. `columns`: names of the columns to fetch; empty: all. `papers`: this process's;
        None: plain text. `stall_s`: seconds without a sign of life after which the connection is given up.

        Connects at the first part. Tunes malloc (`headrace.transport.malloc`).
        """
        keep_freed_pages()
        self._endpoint = endpoint
        self._columns = tuple(columns)
        self._client = flight.connect(
            location(endpoint, tls=papers is not None), generic_options=_options(int(1000 * stall_s)), **_secured(papers)
        )
        self._closed = threading.Event()
        self._readers: set[flight.FlightStreamReader] = set()
        self._lock = threading.Lock()  # guards _readers

    def fetch(self, ticket: str, timeout_s: float) -> Delivery:
        """Fetch a part as batches, as `base.Receiver.fetch` says. The batches belong to the consumer, and their memory is freed
        with the last reference to them."""
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
        """Cancel all fetches under way and refuse new ones, as `base.Receiver.close` says."""
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
            table.validate(full=True)  # offsets beyond their buffer would crash the reader
        except pa.ArrowInvalid as err:
            raise DamagedError(f"part {part_of(ticket)} of {self._endpoint} came damaged ({err})") from err
        batches = tuple(table.replace_schema_metadata(None).to_batches())
        verify(header, lambda: values_checksum(batches), f"part {part_of(ticket)} of {self._endpoint}")
        return Delivery(header=header, batches=batches, transport=FLIGHT, release=_nothing)

    @contextlib.contextmanager
    def _cancellable(self, reader: flight.FlightStreamReader) -> Iterator[None]:
        """Let `close` cancel the reader during the block. Raises UnavailableError if this receiver is closed already."""
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
        """Turn Arrow's errors during the block into the error that the server refused with, or into UnavailableError if the
        connection broke. FlightTimedOutError passes through."""
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
    """Return the CRC-32 over the list lengths and values of every column, column by column and batch by batch."""
    crc = 0
    for batch in batches:
        for column in batch.columns:
            while pa.types.is_nested(column.type):
                if not pa.types.is_fixed_size_list(column.type):
                    crc = zlib.crc32(column.value_lengths().to_numpy(), crc)
                column = column.flatten()  # only the slice's values, unlike `values`
            crc = zlib.crc32(column.to_numpy(), crc)
    return crc


def location(endpoint: str, *, tls: bool) -> str:
    """Return the Flight URI of an endpoint HOST:PORT."""
    return f"{'grpc+tls' if tls else 'grpc'}://{endpoint}"


def _secured(papers: Papers | None) -> dict[str, Any]:
    if papers is None:
        return {}
    shown = {"cert_chain": papers.chain, "private_key": papers.key}
    return {"tls_root_certs": papers.authorities, "override_hostname": PREPROCESSOR, **shown}


def _options(stall_ms: int) -> list[tuple[str, int]]:
    """Return gRPC channel options that detect within about `stall_ms` that the peer is dead."""
    return [
        ("grpc.keepalive_time_ms", stall_ms // 2),
        ("grpc.keepalive_timeout_ms", stall_ms // 2),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.ping_timeout_ms", stall_ms),  # for bandwidth pings, which delay those of keepalive
        ("grpc.min_reconnect_backoff_ms", stall_ms),  # also the limit on connecting
        ("grpc.use_local_subchannel_pool", 1),  # so that a new receiver does not inherit a broken connection
    ]


def _nothing() -> None:
    """Do nothing: a delivery by Flight has nothing to give back."""
