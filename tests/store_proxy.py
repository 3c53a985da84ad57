"""A network between a reorder service and its Redis server that loses answers, and delivers copies of commands late."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from tests.wire import free_ports


class StoreProxy:
    """Forwards connections to a server on this machine. Each is served by two threads until either side closes it."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        (port,) = free_ports(1)
        self.url = f"redis://127.0.0.1:{port}/0"
        self._listener = socket.create_server(("127.0.0.1", port))
        self._lock = threading.Lock()
        self._wanted: bytes | None = None
        self._held: bytes | None = None
        self.caught = threading.Event()
        """Set when an answer was lost."""
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_answer_to(self, words: bytes) -> None:
        """Lose the answer to the next command that has `words` in it, and break its connection."""
        with self._lock:
            self._wanted = words

    def deliver_copy(self) -> None:
        """Send the command whose answer was lost once more, as a network does that held a copy back."""
        assert self._held is not None
        with socket.create_connection(("127.0.0.1", self._server_port)) as server:
            server.sendall(self._held)
            server.recv(1 << 16)

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._server_port))
                except OSError:
                    client.close()
                    continue
                loses = threading.Event()
                threading.Thread(target=self._commands, args=(client, server, loses), daemon=True).start()
                threading.Thread(target=self._answers, args=(server, client, loses), daemon=True).start()

    def _commands(self, client: socket.socket, server: socket.socket, loses: threading.Event) -> None:
        for data in _chunks(client):
            with self._lock:
                if self._wanted is not None and self._wanted in data:
                    self._wanted, self._held = None, data
                    loses.set()
            with contextlib.suppress(OSError):
                server.sendall(data)
        _close(server)

    def _answers(self, server: socket.socket, client: socket.socket, loses: threading.Event) -> None:
        for data in _chunks(server):
            if loses.is_set():
                self.caught.set()
                break
            with contextlib.suppress(OSError):
                client.sendall(data)
        _close(server, client)


def _chunks(source: socket.socket) -> Iterator[bytes]:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 20):
            yield data


def _close(*sockets: socket.socket) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()
