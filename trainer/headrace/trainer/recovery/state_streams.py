"""Streams of bytes from one node to another: TCP connections of their own, beside gloo's.

They are for what is large. gloo's messages alone take more of a receiver's core than these with digests of what came (`make
bench-recovery` has both), and nothing can be done with the first half of a message while the rest is on its way.

Each node of a mesh has a door, whose address and key it tells in the mesh's store: who can read that gets in, as with gloo.
One end of every stream has the address of a door, by which `Mesh.cut` finds and ends it.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from headrace.trainer.recovery.tcp_sockets import address_of

_CHECK_S = 0.02  # how often a node that waits for a connection checks for a cut
_HELLO_S = 5.0  # how long a connection may take to say whose it is
_WAKE_BYTES = 1 << 20  # a node is woken up when so much has come, or all that it waits for, and not by each packet
_KEY_BYTES = 16
_RANK_BYTES = 4


class Stream:
    """One end of a connection on which bytes go one way. Its methods raise ConnectionError once the connection has ended."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        """timeout_s: longest wait for the other end to send or to take anything."""
        self._connection = connection
        connection.settimeout(timeout_s)

    def send(self, data: memoryview | bytes) -> None:
        """Send all of these bytes."""
        try:
            self._connection.sendall(data)
        except OSError as err:
            raise ConnectionError(err.strerror or str(err)) from err

    def receive(self, into: memoryview) -> None:
        """Receive as many bytes as there is room for."""
        while into:
            try:
                self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(len(into), _WAKE_BYTES))
                received = self._connection.recv_into(into)
            except OSError as err:
                raise ConnectionError(err.strerror or str(err)) from err
            if not received:
                raise ConnectionError("Connection closed by peer")
            into = into[received:]

    def end(self) -> None:
        """End the connection, and with it every wait at both ends. May be called from any thread."""
        with suppress(OSError):  # ended already
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end, once no thread uses it. What was sent still arrives."""
        self._connection.close()


@dataclass(frozen=True, slots=True)
class Streams:
    """A node's streams, by the rank of the other end."""

    to: dict[int, Stream] = field(default_factory=dict)
    of: dict[int, Stream] = field(default_factory=dict)

    def end(self) -> None:
        """End all connections, and with them every wait. May be called from any thread."""
        for stream in (*self.to.values(), *self.of.values()):
            stream.end()

    def close(self) -> None:
        """Close this node's ends, once no thread uses them."""
        for stream in (*self.to.values(), *self.of.values()):
            stream.close()


class Door:
    """Where the streams of other nodes come in."""

    def __init__(self, host: str) -> None:
        """`host`: address at which other nodes reach this one."""
        self._listener = socket.create_server((host, 0))
        self._listener.settimeout(_CHECK_S)
        self._key = secrets.token_bytes(_KEY_BYTES)
        self.told = f"{host}:{self._listener.getsockname()[1]}/{self._key.hex()}"
        """What another node needs to know to get in: the address and the key."""

    def shut(self) -> None:
        """Let nobody in any more, and send away whoever waits. May be called from any thread."""
        with suppress(OSError):  # shut already
            self._listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the port, once no thread waits at the door."""
        self._listener.close()

    def let_in(self, ranks: Collection[int], timeout_s: float, check: Callable[[], None]) -> Iterator[tuple[int, Stream]]:
        """Yield these ranks' streams as they come. Raises what `check` raises, and ConnectionError if one comes too late."""
        awaited, deadline = set(ranks), time.monotonic() + timeout_s
        while awaited:
            check()
            try:
                connection, _ = self._listener.accept()
            except TimeoutError as err:
                if time.monotonic() > deadline:
                    raise ConnectionError(f"Connection timed out: no stream of rank {min(awaited)}") from err
                continue
            except OSError as err:
                raise ConnectionError(err.strerror or str(err)) from err
            stream = Stream(connection, _HELLO_S)
            rank = self._rank_behind(stream)
            if rank in awaited:
                awaited.remove(rank)
                yield rank, Stream(connection, timeout_s)
            else:  # a stranger
                stream.close()

    def _rank_behind(self, stream: Stream) -> int:
        """Return the rank that a connection says it is of, or -1 where it doesn't know the key."""
        said = bytearray(_KEY_BYTES + _RANK_BYTES)
        try:
            stream.receive(memoryview(said))
        except ConnectionError:
            return -1
        return int.from_bytes(said[_KEY_BYTES:]) if secrets.compare_digest(said[:_KEY_BYTES], self._key) else -1


def address_behind(told: str) -> tuple[str, int]:
    """Return the host and the port of a door that told this."""
    return address_of(told.partition("/")[0])


@contextmanager
def open_streams(
    door: Door,
    told: Sequence[str],
    rank: int,
    *,
    targets: Collection[int],
    sources: Collection[int],
    timeout_s: float,
    check: Callable[[], None],
) -> Iterator[Streams]:
    """Return a context with a stream to each target and one of each source, all of which open theirs at the same time.

    door: this node's. told: what each node's door told, by rank. rank: this node's. timeout_s: longest wait for another node.
    check: is called while this node waits for others, and may raise. Raises ConnectionError.
    """
    streams = Streams()
    try:
        for target in targets:
            streams.to[target] = _knock(told[target], rank, timeout_s, check)
        for source, stream in door.let_in(sources, timeout_s, check):
            streams.of[source] = stream
        check()  # a cut has ended the connections that it found
        yield streams
    finally:
        streams.close()


def _knock(told: str, rank: int, timeout_s: float, check: Callable[[], None]) -> Stream:
    """Open a stream to the node whose door told this. A host that is silent is waited for as long as the system does."""
    key = bytes.fromhex(told.partition("/")[2])
    connection = socket.socket()
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        connection.setblocking(False)
        connection.connect_ex(address_behind(told))
        poll = select.poll()
        poll.register(connection, select.POLLOUT)
        while not poll.poll(1e3 * _CHECK_S):
            check()
        if error := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise ConnectionError(os.strerror(error))
        stream = Stream(connection, timeout_s)
        stream.send(key + rank.to_bytes(_RANK_BYTES))
    except BaseException:
        connection.close()
        raise
    return stream
