"""Fetches parts from preprocessors, by whatever transport both sides have."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from headrace.errors import NotFoundError, PermissionDeniedError, UnavailableError, UserError
from headrace.message_codec import rejection_value
from headrace.quarantine import Rejected
from headrace.sample import SCHEMA
from headrace.ticket import part_of
from headrace.trainer.loading.connection import Connection, Terms
from headrace.transport.base import TRANSPORTS, DamagedError, Delivery, checksum, read_batches, verify


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedPart:
    """A fetched part: one Arrow row per sample, and the samples that turned out to be damaged."""

    batches: tuple[pa.RecordBatch, ...]
    """All rows in order, with the requested columns. Their memory belongs to `delivery`: do not read them after its release."""
    rejected: tuple[Rejected, ...]
    num_bytes: int
    """Bytes of memory that the part occupies."""
    delivery: Delivery


class PartClient:
    """Fetches parts from preprocessors, over one connection to each. Thread-safe."""

    def __init__(
        self,
        transports: Sequence[str] = TRANSPORTS,
        columns: Sequence[str] | None = None,
        *,
        token: str | None = None,
        tls: str | Path | None = None,
    ) -> None:
        """`columns`: those of sample.SCHEMA to fetch; empty: all. `token`, `tls`: see `connection.Terms`.

        Raises UserError for transports that are not in headrace.transport.base.TRANSPORTS and columns not in the schema.
        """
        columns = tuple(columns or ())
        if not transports or not set(transports) <= set(TRANSPORTS):
            raise UserError(f"transports {tuple(transports)!r} must be some of {', '.join(TRANSPORTS)}")
        if not set(columns) <= set(SCHEMA.names):
            raise UserError(f"columns {columns!r} must be some of {', '.join(SCHEMA.names)}")
        self._terms = Terms(transports=frozenset(transports), columns=columns, token=token, tls=tls)
        self._connections: dict[str, Connection] = {}
        self._lock = threading.Lock()

    def fetch(self, endpoint: str, ticket: str) -> FetchedPart:
        """Fetch a part from the preprocessor at `endpoint`; it is valid until its delivery is released.

        Raises NotFoundError where the preprocessor does not hold the part or rejects the ticket (either way the part must be
        had elsewhere), UnavailableError where the preprocessor is gone or the part came damaged, and UserError where none of the
        allowed transports is possible with it or its TLS settings differ from ours.
        """
        with self._lock:
            connection = self._connections.get(endpoint)
            if connection is None:
                connection = self._connections[endpoint] = Connection(endpoint, self._terms)
        try:
            delivery = connection.fetch(ticket)
        except PermissionDeniedError as err:
            raise NotFoundError(str(err)) from err
        except DamagedError:
            raise
        except UnavailableError:
            self._drop(connection)
            raise
        try:
            return _part(delivery, self._terms.columns, f"part {part_of(ticket)} of {endpoint}")
        except BaseException:
            delivery.release()
            raise

    def _drop(self, connection: Connection) -> None:
        """Close and forget a broken connection: preprocessors come and go, each with a port of its own."""
        with self._lock:
            if self._connections.get(connection.endpoint) is connection:
                del self._connections[connection.endpoint]
        connection.close()

    def close(self) -> None:
        """Close all connections. Parts delivered through shared memory stay readable until they are released."""
        with self._lock:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()
        self._terms.ucx.close()


def _part(delivery: Delivery, columns: tuple[str, ...], what: str) -> FetchedPart:
    """Verify and read a delivery. Raises DamagedError where its checksum differs."""
    header, buffer = delivery.header, delivery.buffer
    if buffer is not None:
        verify(header, lambda: checksum(buffer), what)
        batches, num_bytes = read_batches(buffer, columns), buffer.size
    else:
        batches, num_bytes = delivery.batches, sum(batch.get_total_buffer_size() for batch in delivery.batches)
    rejected = tuple(rejection_value(item) for item in header.rejections)
    return FetchedPart(batches=batches, rejected=rejected, num_bytes=num_bytes, delivery=delivery)
