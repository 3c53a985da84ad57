"""A preprocessor's Flight server, which sends parts from the store's memory without a copy.

The protocol is described in `headrace.transport.flight`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from numpy.typing import NDArray
from pyarrow import flight

from headrace.errors import EndpointError, HeadraceError, NotFoundError, PermissionDeniedError, UnknownTicketError, UserError
from headrace.identity import Papers
from headrace.refusals import Reason, Refusals
from headrace.transport.base import checksum, read_batches, refusal_message
from headrace.transport.flight import HEADER, location, values_checksum
from headrace.v1 import payload_pb2

# Most bytes of a batch of several rows: 1, 2, 4 and 8 MiB reach 0.86, 0.96, 1.03 and 1.02 times the rate of a bare socket.
BATCH_BYTES = 4 << 20
WAIT_S = 1.0  # how long a call waits for a part that is being decoded
MAX_CALLS = 256  # calls that wait or send at a time, each on a thread of the server


@dataclass(frozen=True, slots=True, kw_only=True)
class Loan:
    """A decoded part that its store keeps unchanged in memory for as long as it is lent (`Lend`)."""

    header: payload_pb2.PartHeader
    """The part's header; its `crc32`, if any, is that of `data`."""
    data: pa.Buffer
    """The part as an Arrow IPC stream."""


Lend = Callable[[payload_pb2.FetchRequest], AbstractAsyncContextManager[Loan]]
"""A function that returns a context manager, which waits for the requested part and keeps it during the block. A HeadraceError
that it raises is passed on to the client."""


_REFUSED = {
    UserError: Reason.MALFORMED,
    PermissionDeniedError: Reason.FORGED_TICKET,
    UnknownTicketError: Reason.UNKNOWN_TICKET,
}
"""Errors that are lines of the log."""


class _Caller:
    """A Flight call as `headrace.refusals` wants to know it; its metadata is not looked at."""

    def __init__(self, context: flight.ServerCallContext) -> None:
        self._context = context

    def peer(self) -> str:
        return str(self._context.peer())

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()


class FlightServer(flight.FlightServerBase):  # type: ignore[misc]
    """A Flight server that sends the parts which an event loop lends. It listens as soon as it is constructed."""

    def __init__(self, listen: str, lend: Lend, papers: Papers | None = None) -> None:
        """`listen`: HOST:PORT; the `port` that it got is an attribute. `papers`: for TLS, with which clients must show
        certificates too; others cannot be taken up later. None: plain text.

        Call it in a coroutine of the event loop on which `lend` works. Raises EndpointError if `listen` is taken or not of this
        machine.
        """
        self._loop = asyncio.get_running_loop()
        self._lend = lend
        self._refusals = Refusals()
        self._places = threading.Semaphore(MAX_CALLS)
        self._waiting: set[Future[Any]] = set()
        try:
            super().__init__(location(listen, tls=papers is not None), **_secured(papers))
        except pa.ArrowException as err:
            raise EndpointError(
                f"cannot listen on {listen} for Arrow Flight: the port is taken or the address is not of this machine; give "
                "--flight-port another, 0 takes a free one"
            ) from err

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.RecordBatchStream:
        """Answer one call with the requested part. Flight calls it on a thread of the server for each call."""
        with _told(), self._noted(context):
            try:
                request = payload_pb2.FetchRequest.FromString(ticket.ticket)
            except DecodeError as err:
                raise UserError("the Flight ticket is no FetchRequest: is the peer Headrace's?") from err
            return flight.RecordBatchStream(_table(self._borrow(request), request.columns))

    @contextlib.contextmanager
    def _noted(self, context: flight.ServerCallContext) -> Iterator[None]:
        """Note a call with a ticket that cannot be one of the jobs here; parts that are gone are everyday life."""
        try:
            yield
        except HeadraceError as err:
            if (reason := _REFUSED.get(type(err))) is not None:
                self._refusals.note(reason, "DoGet", _Caller(context))
            raise

    def stop(self, grace_s: float) -> None:
        """Refuse new calls, and let those that send end within `grace_s`. Blocks; do not call it on the event loop's thread."""
        ending = threading.Thread(target=self.shutdown, name="flight-stop", daemon=True)  # returns after the last receiver
        ending.start()
        for lending in list(self._waiting):
            lending.cancel()
        ending.join(grace_s)

    def _borrow(self, request: payload_pb2.FetchRequest) -> Loan:
        """Return a part that stays on loan until nothing refers to its buffer any more; C++ does until the last byte is sent.

        Raises FlightTimedOutError if no thread is free or the part is not decoded within WAIT_S, and what `lend` raises.
        """
        if not self._places.acquire(blocking=False):
            raise flight.FlightTimedOutError("no thread is free")
        lent: Future[Any] = Future()
        lending: Future[Any] = asyncio.run_coroutine_threadsafe(self._keep(request, lent), self._loop)
        lending.add_done_callback(lambda _: self._places.release())
        self._waiting.add(lending)
        wait([lent, lending], WAIT_S, FIRST_COMPLETED)
        self._waiting.discard(lending)
        if lent.done():
            loan = lent.result()
            return Loan(header=loan.header, data=_watched(loan.data, lending.cancel))
        if lending.cancel():
            raise flight.FlightTimedOutError("the part is not decoded yet")
        lending.result()  # raises why the part is not lent
        raise AssertionError("a loan ended by itself")

    async def _keep(self, request: payload_pb2.FetchRequest, lent: Future[Loan]) -> None:
        """Borrow a part from the store, hand it over through `lent`, and hold it until cancelled."""
        async with self._lend(request) as loan:
            lent.set_result(loan)
            await asyncio.Event().wait()


def _secured(papers: Papers | None) -> dict[str, Any]:
    if papers is None:
        return {}
    shown = [(papers.chain, papers.key)]
    return {"tls_certificates": shown, "verify_client": True, "root_certificates": papers.authorities}


def split(batch: pa.RecordBatch, max_bytes: int = BATCH_BYTES) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a batch in order, without copying, in slices of at most `max_bytes`, or of one row that has more."""
    ends = _row_ends(batch)
    start = 0
    while start < batch.num_rows:
        stop = max(start + 1, int(np.searchsorted(ends, ends[start] + max_bytes, side="right")) - 1)
        yield batch.slice(start, stop - start)
        start = stop


def _row_ends(batch: pa.RecordBatch) -> NDArray[np.int64]:
    """Return (n + 1,) the cumulative bytes of the rows: entry k counts the rows before row k, and the last counts all.

    They are computed from the lists' offsets, because `nbytes` takes some 10 us per slice.
    """
    ends = np.zeros(batch.num_rows + 1, np.int64)
    for column in batch.columns:
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            ends += column.offsets.to_numpy() * _width(column.type.value_type)
        else:
            ends += np.arange(batch.num_rows + 1) * _width(column.type)
    return ends


def _width(kind: pa.DataType) -> int:
    """Return the bytes of a value of a fixed-width type."""
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _width(kind.value_type)
    return int(kind.bit_width) // 8


def _table(loan: Loan, columns: Sequence[str]) -> pa.Table:
    """Return the table to send, with the header in its schema's metadata. Raises NotFoundError if the part is damaged."""
    (batch,) = read_batches(loan.data, columns)
    pieces = list(split(batch))
    header = payload_pb2.PartHeader()
    header.CopyFrom(loan.header)
    if header.HasField("crc32"):
        if header.crc32 != checksum(loan.data):
            raise NotFoundError("the part is damaged where it is held: its checksum differs")
        header.crc32 = values_checksum(pieces)
    return pa.Table.from_batches(pieces, batch.schema.with_metadata({HEADER: header.SerializeToString()}))


class _Hold:
    """The owner of lent bytes from Arrow's point of view, which is collected with the last reference to them."""

    __slots__ = ("__weakref__", "_data")

    def __init__(self, data: pa.Buffer) -> None:
        self._data = data


def _watched(data: pa.Buffer, give_back: Callable[[], object]) -> pa.Buffer:
    """Return a buffer of the same bytes that calls `give_back` when the last reference to it goes, on whichever thread."""
    hold = _Hold(data)
    weakref.finalize(hold, give_back).atexit = False
    return pa.foreign_buffer(data.address, data.size, base=hold)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Turn Headrace errors during the block into Flight errors that carry a Refusal."""
    try:
        yield
    except HeadraceError as err:
        raise flight.FlightServerError(str(err), extra_info=refusal_message(err).SerializeToString()) from err
