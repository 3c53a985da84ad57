"""A TCP proxy that breaks as networks do: between two processes, or in front of a server in the test's own."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

from headrace.processes import free_port

NEAR = "127.0.0.2"  # for wires whose other ends are at the same ports of 127.0.0.1
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: what closes does not wait, it resets


class Wire:
    """A TCP proxy in front of `endpoint`. All of it can be cut, go silent and be mended; each connection can be cut, stall, or
    have a bit of what comes back flipped."""

    def __init__(
        self,
        endpoint: str,
        *,
        listen: tuple[str, int] = ("127.0.0.1", 0),
        cut_after_bytes: int | None = None,
        stall_after_bytes: int | None = None,
        flips: bytes = b"",
    ) -> None:
        """`cut_after_bytes`, `stall_after_bytes`: of each connection. `flips`: a byte behind the first occurrence is damaged."""
        host, _, port = endpoint.rpartition(":")
        self._upstream = (host, int(port))
        self._cut_after_bytes = cut_after_bytes
        self._stall_after_bytes = stall_after_bytes
        self.flips = flips
        """Empty once it was found."""
        self._stopped = threading.Event()
        self._passes = threading.Event()
        self._passes.set()
        self._is_cut = False
        self.num_bytes = 0
        """That came back, over all connections."""
        self.num_bytes_forth = 0
        self.num_faults = 0
        self._listener = socket.create_server(listen)
        self._lock = threading.Lock()  # of the sockets
        self._sockets: set[socket.socket] = set()
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Reset all connections, and each new one, until `mend`."""
        self._is_cut = True
        for end in self._open():
            _close(end, reset=True)

    def silence(self) -> None:
        """Pass nothing on, neither bytes nor the ends of connections, until `mend`. Nobody is told."""
        self._passes.clear()

    def mend(self) -> None:
        """Pass on what comes, and what came while it was silent."""
        self._is_cut = False
        self._passes.set()

    def stop(self) -> None:
        self._stopped.set()
        self._passes.set()
        for end in (self._listener, *self._open()):
            _close(end)

    def _open(self) -> list[socket.socket]:
        with self._lock:
            return list(self._sockets)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._passes.wait()
                try:
                    if self._is_cut:
                        raise ConnectionResetError
                    far = socket.create_connection(self._upstream)
                except OSError:
                    _close(near, reset=self._is_cut)
                    continue
                with self._lock:
                    self._sockets |= {near, far}
                threading.Thread(target=self._pump, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(far, near, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, faulty: bool) -> None:
        num_bytes = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                num_bytes += len(data)
                if faulty:
                    self.num_bytes += len(data)
                else:
                    self.num_bytes_forth += len(data)
                if faulty and self._cut_after_bytes is not None and num_bytes > self._cut_after_bytes:
                    self.num_faults += 1
                    break
                if faulty and self._stall_after_bytes is not None and num_bytes > self._stall_after_bytes:
                    self.num_faults += 1
                    self._stopped.wait()  # both ends stay open
                if faulty and self.flips and self.flips in data[:-1]:
                    at = data.index(self.flips) + len(self.flips) - 1
                    data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
                    self.flips = b""
                    self.num_faults += 1
                self._passes.wait()
                sink.sendall(data)
        self._passes.wait()
        for end in (source, sink):
            _close(end)
        with self._lock:
            self._sockets -= {source, sink}


def _close(end: socket.socket, *, reset: bool = False) -> None:
    """Also where a thread reads from it, or data lies unread: as a process that dies does."""
    with contextlib.suppress(OSError):
        if reset:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def free_ports(count: int) -> list[int]:
    """Ports that are free at 127.0.0.1 and at NEAR, and stay so while nobody listens there."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port("127.0.0.1", NEAR))
    return list(ports)
