"""A preprocessor's real store, arena and servers, parts to put into them, and a wire with faults: all but the decoding.

As a script, `payload_world.py produce` is such a preprocessor in a process of its own, and `payload_world.py hold ARENA TICKET`
a reader that holds a part until it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.rpc import Server
from headrace.sample import SCHEMA
from headrace.transport import chunks
from headrace.transport.slots import SlotReceiver, SlotServer
from preprocessor.arena import Arena
from preprocessor.server import PayloadServicer
from preprocessor.store import Entry, PayloadStore, PayloadWriter

MIB = 1 << 20


def make_batch(num_bytes: int, sample_id: int = 0) -> pa.RecordBatch:
    """One sample with about `num_bytes` of payload, different for each id."""
    patches = np.full(num_bytes, sample_id % 256, np.uint8)
    row: dict[str, Any] = {"sample_id": [sample_id], "input_ids": [[5, 6]], "labels": [[-100, 6]], "image_grids": [[]]}
    row |= {"mel": [[]], "mel_frames": [[]], "flags": [0]}
    columns = [
        pa.LargeListArray.from_arrays(pa.array([0, num_bytes]), pa.array(patches))
        if field.name == "patches"
        else pa.array(row[field.name], field.type)
        for field in SCHEMA
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


class Producer:
    """Decodes what it is told to by writing the batch that it was given. Runs on a loop of its own, in a thread."""

    def __init__(
        self, budget_bytes: int, *, shared: bool = True, with_checksum: bool = False, listen: str = "127.0.0.1:0"
    ) -> None:
        self.arena = Arena(budget_bytes) if shared else None
        self.store = PayloadStore(budget_bytes, self.arena)
        self.servicer = PayloadServicer(self.store, self.arena)
        self.num_decoded = 0
        self._batches: dict[str, pa.RecordBatch] = {}
        self._writer = PayloadWriter(self.arena, with_checksum=with_checksum)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._run(self._start(listen))

    async def _start(self, listen: str) -> None:
        self._server = Server(listen, {chunks.SERVICE: lambda server: chunks.add_service(server, self.servicer)})
        self.endpoint = self._server.endpoint
        await self._server.start()
        if self.arena is not None:
            self._slots = SlotServer(self.arena.path, self.servicer.tell_slot)
            await self._slots.start()
        self._decoding = asyncio.create_task(self._decode())

    async def _decode(self) -> None:
        while True:
            entry = await self.store.take()
            self.store.fill(entry, self._writer.write(self._batches[entry.ticket], ()))
            self.num_decoded += 1
            await asyncio.sleep(0)

    def add(self, ticket: str, batch: pa.RecordBatch, *, step: int = 0) -> None:
        """A lease on a part."""
        self._batches[ticket] = batch
        self.call(lambda: self.store.add(Entry(ticket=ticket, job="job", step=step, priority=step, refs=())))

    def add_stuck(self, ticket: str) -> None:
        """A lease on a part that is being decoded, and never will be."""
        entry = Entry(ticket=ticket, job="job", step=0, priority=0, refs=(), decoding=True)
        self.call(lambda: self.store.add(entry))

    def commit(self, step: int) -> None:
        """All ranks have committed it."""
        self.call(lambda: self.store.release("job", step))

    def call(self, function: Callable[[], Any]) -> Any:
        """On the store's loop."""

        async def called() -> Any:
            return function()

        return self._run(called())

    def _run(self, coroutine: Any) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(timeout=20)

    def stop(self) -> None:
        if self._loop.is_closed():
            return

        async def stop() -> None:
            self._decoding.cancel()
            if self.arena is not None:
                await self._slots.stop()
            await self._server.stop(0)

        self._run(stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()
        if self.arena is not None:
            self.arena.close()


class Wire:
    """A TCP proxy in front of `endpoint` that can be cut, or flip a bit of what comes back."""

    def __init__(self, endpoint: str, *, cut_after_bytes: int | None = None, flips: bytes = b"") -> None:
        """`flips`: the first byte behind the first occurrence of this is damaged."""
        host, _, port = endpoint.rpartition(":")
        self._upstream = (host, int(port))
        self._cut_after_bytes = cut_after_bytes
        self._flips = flips
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._upstream)
                self._sockets += [near, far]
                threading.Thread(target=self._pump, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(far, near, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, faulty: bool) -> None:
        num_bytes = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                num_bytes += len(data)
                if faulty and self._cut_after_bytes is not None and num_bytes > self._cut_after_bytes:
                    break
                if faulty and self._flips and self._flips in data[:-1]:
                    at = data.index(self._flips) + len(self._flips) - 1
                    data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
                    self._flips = b""
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        for end in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def _hold(arena: str, ticket: str) -> None:
    delivery = SlotReceiver(arena).fetch(ticket, 10.0)
    assert delivery is not None
    print("held", flush=True)
    sys.stdin.read()


def _produce() -> None:
    producer = Producer(8 * MIB)
    producer.add("part", make_batch(MIB, 7))
    assert producer.arena is not None
    print(producer.endpoint, producer.arena.path.name, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _hold(*sys.argv[2:]) if sys.argv[1] == "hold" else _produce()
