"""The door of the page where it is HTTPS: who does not speak TLS is told so, and who is turned away is a line of the log.

asyncio's own server hangs up on them without a word to either side. Here a connection waits in a hall until its first byte is
there, which is looked at and left for TLS to read.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Any

from headrace.refused_connections import ConnectionLog

PATIENCE_S = 60.0  # for a first byte, and for a handshake
LINGER_S = 2.0  # for who is refused to read why
_HANDSHAKE = b"\x16"  # the first byte of every TLS connection
_MOST_ASKED = 1 << 16  # bytes of a refused request that are read, without which closing could take the answer back
_PLAIN_TEXT, _SILENT, _HUNG_UP, _DISTRUSTED = "plain text", "silent", "hung up", "does not accept the certificate"
_ANSWER = "this port speaks HTTPS only: ask https://{address}/, with the ca.crt of the service's papers as the authority\n"


class Door:
    """Makes protocols for asyncio's server: each hands a connection on to a protocol of `inside`, over TLS, or refuses it."""

    def __init__(self, context: ssl.SSLContext, inside: Callable[[], asyncio.Protocol]) -> None:
        self._context = context
        self._inside = inside
        self._log = ConnectionLog((_PLAIN_TEXT, _SILENT, _HUNG_UP, _DISTRUSTED))
        self._arriving: set[asyncio.Task[None]] = set()

    def __call__(self) -> asyncio.Protocol:
        return _Hall(self._enter)

    async def close(self) -> None:
        """Hang up on all who are not inside yet."""
        for task in self._arriving:
            task.cancel()
        await asyncio.gather(*self._arriving, return_exceptions=True)

    def _enter(self, connection: socket.socket) -> None:
        task = asyncio.get_running_loop().create_task(self._receive(connection))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    async def _receive(self, connection: socket.socket) -> None:
        loop, peer, handed_on = asyncio.get_running_loop(), _peer(connection), False
        try:
            async with asyncio.timeout(PATIENCE_S):
                first = await _first_byte(connection)
            if first == _HANDSHAKE:
                handed_on = True  # closed by the transport, whatever becomes of it
                await loop.connect_accepted_socket(self._inside, connection, ssl=self._context, ssl_handshake_timeout=PATIENCE_S)
            elif first:  # who only looks whether the port is open is none of ours
                self._log.note(peer, _PLAIN_TEXT)
                await _tell(connection)
        except TimeoutError:
            self._log.note(peer, _SILENT)
        except OSError as err:  # which ssl.SSLError is
            if handed_on:
                self._log.note(peer, _reason(err))
        finally:
            if not handed_on:
                connection.close()


class _Hall(asyncio.Protocol):
    """Takes a connection out of its transport before anything of it is read."""

    def __init__(self, enter: Callable[[socket.socket], None]) -> None:
        self._enter = enter

    def connection_made(self, transport: Any) -> None:
        transport.pause_reading()
        try:
            connection = transport.get_extra_info("socket").dup()
        finally:
            transport.abort()  # closes its own descriptor alone
        connection.setblocking(False)
        self._enter(connection)


async def _first_byte(connection: socket.socket) -> bytes:
    """Return the first byte, which stays to be read; nothing of a connection that ends without any. Raises OSError."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(connection)
    return connection.recv(1, socket.MSG_PEEK)


async def _tell(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    host, port = connection.getsockname()[:2]
    sentence = _ANSWER.format(address=f"[{host}]:{port}" if ":" in host else f"{host}:{port}").encode()
    head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: {len(sentence)}\r\nConnection: close\r\n\r\n"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            await loop.sock_recv(connection, _MOST_ASKED)
            await loop.sock_sendall(connection, head.encode() + sentence)
            connection.shutdown(socket.SHUT_WR)
            await loop.sock_recv(connection, _MOST_ASKED)


def _reason(err: OSError) -> str:
    if isinstance(err, ssl.SSLError) and "alert" in str(err).lower():
        return _DISTRUSTED
    return _HUNG_UP if not isinstance(err, ssl.SSLError) else (err.reason or str(err)).lower().replace("_", " ")


def _peer(connection: socket.socket) -> str:
    try:
        host, port = connection.getpeername()[:2]
    except OSError:  # it has gone already
        return "unknown"
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
