"""Payload through UCX, the rank's end: over RDMA if there is a fabric, and otherwise over TCP.

A preprocessor announces a port and a token by gRPC. Whoever connects to the port is first shown the token, so that a rank knows
that it has reached the right process. The rank then asks for any number of parts at a time, and each is received into a reused
buffer (`ucx_connection` has the messages, `ucx_buffers` the memory). UCX neither encrypts nor authenticates: a part is protected
only by its unguessable ticket, so the port belongs in a network whose members may see the payload.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import pyarrow as pa

from headrace.errors import HeadraceError, UnavailableError
from headrace.observability.logs import pairs
from headrace.ticket import part_of
from headrace.transport.base import UCX, Delivery, Receiver, refusal_value
from headrace.transport.ucx_buffers import MAX_IDLE_BYTES, Allocate, Lease, ReceiveBuffers, allocate_pageable
from headrace.transport.ucx_connection import HELLO, QUESTION_HEAD, REPLY_HEAD, Connection, Kind, Role, numbers
from headrace.transport.ucx_library import UcxError
from headrace.transport.ucx_loop import UcxLoop
from headrace.v1 import payload_pb2

log = logging.getLogger(__name__)

VERSION = 1
CONNECT_TIMEOUT_S = 5.0  # a handshake takes some 20 ms; a port behind a firewall that drops packets never answers


@dataclass(slots=True, kw_only=True, eq=False)
class _Fetch:
    """One part that a thread waits for in `UcxReceiver.fetch`."""

    ticket: str
    delivery: Future[Delivery] = field(default_factory=Future)

    def succeed(self, delivery: Delivery) -> None:
        if self.delivery.set_running_or_notify_cancel():
            self.delivery.set_result(delivery)
        else:
            delivery.release()  # `fetch` timed out

    def fail(self, error: HeadraceError) -> None:
        if self.delivery.set_running_or_notify_cancel():
            self.delivery.set_exception(error)


class UcxClient:
    """A consumer's UCX thread and receive buffers, which its receivers for all preprocessors share. Thread-safe.

    UCX is loaded at the first connection.
    """

    def __init__(self, allocate: Allocate = allocate_pageable, max_idle_bytes: int = MAX_IDLE_BYTES) -> None:
        """`allocate(num_bytes)` returns writable memory, page-locked if it is to be copied to a GPU, or raises MemoryError.
        `max_idle_bytes`: most memory to keep for reuse."""
        self._buffers = ReceiveBuffers(allocate, max_idle_bytes)
        self._lock = threading.Lock()  # guards _loop and _closed
        self._loop: UcxLoop | None = None
        self._closed = False

    def connect(self, host: str, port: int, token: bytes, columns: Sequence[str] = ()) -> UcxReceiver:
        """Connect to the preprocessor that offers this port and token, and return a receiver of parts from it.

        `columns`: names of the columns to fetch; empty: all. Raises UcxError if UCX or the connection fails.
        """
        with self._lock:
            if self._closed:
                raise UcxError("UCX is closed")
            if self._loop is None:
                self._loop = UcxLoop("ucx")
            loop = self._loop
        return UcxReceiver(loop, host, port, token, self._buffers, columns=columns)

    def close(self) -> None:
        """End all connections and the thread. Deliveries stay readable until they are released."""
        with self._lock:
            self._closed = True
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()


class UcxReceiver(Receiver):
    """A receiver that fetches parts from one preprocessor over one UCX connection."""

    def __init__(
        self,
        loop: UcxLoop,
        host: str,
        port: int,
        token: bytes,
        buffers: ReceiveBuffers,
        *,
        columns: Sequence[str] = (),
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        """Connect to the port of a preprocessor, which must show `token`. Raises UcxError if that is not possible.

        `columns`: names of the columns to fetch; empty: all. A part may come with further columns, where that spares the
        preprocessor a copy.
        """
        self._loop = loop
        self._token = token
        self._buffers = buffers
        self._columns = tuple(columns)
        self._peer = f"{host}:{port}"
        self._numbers = numbers()
        self._lanes: Future[tuple[str, ...]] = Future()
        self._connection: Connection | None = None  # this and _number, the producer's for it, are for the loop's thread only
        self._number = 0
        address = _resolve(host, port)
        loop.call(lambda: self._connect(address, port))
        try:
            self.lanes = self._lanes.result(connect_timeout_s)
            """The UCX lanes of the connection, each as TRANSPORT/DEVICE: ("rc_mlx5/mlx5_0:1",)."""
        except TimeoutError as err:
            self.close()
            raise UcxError(f"{self._peer} does not answer by UCX within {connect_timeout_s:g} s") from err

    @property
    def transport(self) -> str:
        """Name of the transport in metrics: "ucx:" and the transports of the connection's lanes, such as "ucx:rc_mlx5"."""
        return ":".join((UCX, "+".join(sorted({lane.partition("/")[0] for lane in self.lanes}))))

    def fetch(self, ticket: str, timeout_s: float) -> Delivery:
        """Fetch a part as bytes in a buffer of the pool, as `base.Receiver.fetch` says.

        Raises UcxError, a TransportError, if the connection is lost, and the HeadraceError with which the preprocessor refuses.
        """
        fetch = _Fetch(ticket=ticket)
        number = next(self._numbers)
        request = payload_pb2.FetchRequest(ticket=ticket, columns=self._columns).SerializeToString()
        self._loop.call(lambda: self._ask(number, fetch, request))
        try:
            return fetch.delivery.result(timeout_s)
        except TimeoutError as err:
            if not fetch.delivery.cancel():
                return fetch.delivery.result()  # it came just now
            self._on_loop(lambda: self._give_up(number))
            raise UnavailableError(f"part {part_of(ticket)} did not come within {timeout_s:g} s from {self._peer}") from err

    def close(self) -> None:
        """End the connection, as `base.Receiver.close` says. The UCX thread stays."""
        self._on_loop(self._disconnect)

    def _on_loop(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(UcxError):  # the loop has ended, and all connections with it
            self._loop.call(function)

    # -- on the loop's thread ---------------------------------------------------------------------------------------------

    def _connect(self, address: str, port: int) -> None:
        try:
            endpoint = self._loop.worker.create_endpoint_from_hostname(address, port, True)
        except self._loop.library.error as err:
            self._lanes.set_exception(UcxError(f"{self._peer} cannot be reached by UCX ({err})"))
            return
        self._connection = Connection(self._loop, endpoint, self._on_lost)
        self._connection.await_greeting(self._on_greeting)

    def _on_greeting(self, greeting: bytes | UcxError) -> None:
        connection = self._connection
        if connection is None or isinstance(greeting, UcxError):
            return  # the connection is lost, which _on_lost has reported
        version, token, self._number = HELLO.unpack(greeting)
        if (version, token) != (VERSION, self._token):
            connection.close("another process than the preprocessor answers")
            return
        lanes = connection.lanes
        log.info("connected %s", pairs(peer=self._peer, transport=UCX, lanes=",".join(lanes)))
        self._lanes.set_result(lanes)

    def _on_lost(self, connection: Connection) -> None:
        self._connection = None
        if not self._lanes.done():
            self._lanes.set_exception(UcxError(f"{self._peer} cannot be reached by UCX ({connection.lost})"))

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close("closed here")

    def _ask(self, number: int, fetch: _Fetch, request: bytes) -> None:
        connection = self._connection
        if connection is None:
            fetch.fail(UcxError(f"the connection to {self._peer} is lost"))
            return
        reply = bytearray()

        def room(num_bytes: int) -> bytearray:
            reply.extend(bytes(num_bytes))
            return reply

        def done(error: UcxError | None) -> None:
            if error is not None:
                fetch.fail(error)
            else:
                self._on_reply(connection, number, fetch, bytes(reply))

        connection.send(Role.QUESTION, self._number, QUESTION_HEAD.pack(Kind.ASK, number) + request)
        connection.receive(Role.REPLY, number, room, done)

    def _give_up(self, number: int) -> None:
        if self._connection is not None:
            self._connection.send(Role.QUESTION, self._number, QUESTION_HEAD.pack(Kind.GIVE_UP, number))

    def _on_reply(self, connection: Connection, number: int, fetch: _Fetch, reply: bytes) -> None:
        """Receive the payload of a part after its reply, even if nobody waits for it any more."""
        (kind,), body = REPLY_HEAD.unpack_from(reply), reply[REPLY_HEAD.size :]
        if kind != Kind.PART:
            fetch.fail(refusal_value(payload_pb2.Refusal.FromString(body)))
            return
        header = payload_pb2.PartHeader.FromString(body)
        leases: list[Lease] = []

        def room(num_bytes: int) -> memoryview:
            try:
                leases.append(self._buffers.take(num_bytes))
            except MemoryError as err:
                raise UcxError(f"there is no memory for a part of {num_bytes} bytes") from err
            return leases[0].view

        def done(error: UcxError | None) -> None:
            if error is None:
                fetch.succeed(self._delivery(header, leases[0]))
                return
            for lease in leases:
                lease()
            fetch.fail(error)

        connection.receive(Role.PAYLOAD, number, room, done)

    def _delivery(self, header: payload_pb2.PartHeader, lease: Lease) -> Delivery:
        buffer = pa.py_buffer(lease.view.toreadonly())
        return Delivery(header=header, buffer=buffer, transport=self.transport, release=lease)


def _resolve(host: str, port: int) -> str:
    """Return an IP address of a host. Raises UcxError if its name does not resolve."""
    try:
        return str(socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as err:
        raise UcxError(f"{host} has no address ({err.strerror})") from err
