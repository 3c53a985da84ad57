"""This process's TCP sockets, also those that torch has opened, and their addresses."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress

_IN_IPV6 = "::ffff:"  # prefix of an IPv4 address on an IPv6 socket, as a TCPStore has them


def listening_ports() -> dict[int, int]:
    """Return the TCP ports on which this process listens, by file descriptor."""
    return {fd: int(found.getsockname()[1]) for fd, found in tcp_sockets(listening=True)}


def tcp_sockets(*, listening: bool) -> Iterator[tuple[int, socket.socket]]:
    """Yield this process's listening, or other, TCP sockets: file descriptor, and a duplicate that is closed on the next step."""
    for fd in _descriptors():
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as found:
            is_tcp = found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) == listening:
                yield fd, found


def _descriptors() -> Iterator[int]:
    """Yield the file descriptors of this process that are sockets.

    Others must be left out, since `socket.socket` raises for the descriptor of another file, and leaves it open.
    """
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                yield int(name)
        except OSError:  # closed meanwhile
            continue


def peer_of(connection: socket.socket) -> tuple[str, int]:
    """Return the address of a connection's other end. Raises OSError if it is not connected."""
    host, port = connection.getpeername()[:2]
    return host.removeprefix(_IN_IPV6), port


def address_of(text: str) -> tuple[str, int]:
    """Return the host and the port of HOST:PORT."""
    host, _, port = text.rpartition(":")
    return host, int(port)
