"""A UCX server whose parts come as a test says, and who asks it.

As a script, `produce` is such a server in a process of its own, and `consume PORT TOKEN TICKET` a rank that can be killed or
stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.errors import HeadraceError
from headrace.transport.base import Delivery
from headrace.transport.flight_server import Loan
from headrace.transport.ucx import UcxReceiver
from headrace.transport.ucx_buffers import ReceiveBuffers
from headrace.transport.ucx_loop import UcxLoop
from headrace.transport.ucx_server import UcxServer
from headrace.v1 import payload_pb2

MIB = 1 << 20

Script = Callable[[], Coroutine[Any, Any, Loan]]


def contents(num_bytes: int, seed: int = 0) -> pa.Buffer:
    return pa.py_buffer(np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8))


PART = contents(3 * MIB)


def loan(data: pa.Buffer) -> Loan:
    return Loan(header=payload_pb2.PartHeader(num_bytes=data.size, num_samples=3), data=data)


async def never() -> Loan:
    await asyncio.Event().wait()
    raise AssertionError


class Lender:
    """Lends `parts`, raises `errors`, or does as `scripts` say. On an event loop of its own, in a thread."""

    def __init__(self, **options: Any) -> None:
        self.parts: dict[str, pa.Buffer] = {"part": PART}
        self.errors: dict[str, HeadraceError] = {}
        self.scripts: dict[str, Script] = {"stuck": never}
        self.returned: dict[str, Callable[[], None]] = {}
        """Called when a part is returned, by ticket."""
        self.ends: dict[str, BaseException | None] = {}
        """How the loans ended, by ticket."""
        self.ended = threading.Condition()
        self.server = UcxServer(self._lend, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.run(self.server.start())

    @contextlib.asynccontextmanager
    async def _lend(self, request: payload_pb2.FetchRequest) -> AsyncIterator[Loan]:
        end: BaseException | None = None
        try:
            if request.ticket in self.errors:
                raise self.errors[request.ticket]
            script = self.scripts.get(request.ticket)
            yield await script() if script is not None else loan(self.parts[request.ticket])
            self.returned.get(request.ticket, int)()
        except BaseException as err:
            end = err
            raise
        finally:
            with self.ended:
                self.ends[request.ticket] = end
                self.ended.notify_all()

    def wait_for_end(self, ticket: str) -> BaseException | None:
        with self.ended:
            assert self.ended.wait_for(lambda: ticket in self.ends, timeout=20)
            return self.ends.pop(ticket)

    def begin(self, function: Callable[[], Any]) -> None:
        """On the event loop, and nobody waits for it."""
        self._loop.call_soon_threadsafe(function)

    def call(self, function: Callable[[], Any]) -> Any:
        """On the event loop, when it has done what it does now."""

        async def called() -> Any:
            return function()

        return self.run(called())

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=20)

    def stop(self) -> None:
        if not self._loop.is_closed():
            self.run(self.server.stop())
            self.run(self._loop.shutdown_default_executor())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=10)
            self._loop.close()


def connect(ucx: UcxLoop, server: UcxServer, buffers: ReceiveBuffers | None = None, **options: Any) -> UcxReceiver:
    return UcxReceiver(ucx, "127.0.0.1", server.port, server.token, buffers or ReceiveBuffers(), **options)


def on_loop(ucx: UcxLoop, function: Callable[[], Any]) -> Any:
    future: Future[Any] = Future()
    ucx.call(lambda: future.set_result(function()))
    return future.result(timeout=20)


def payload(delivery: Delivery) -> pa.Buffer:
    """The bytes of a part, as UCX carries it."""
    assert delivery.buffer is not None
    return delivery.buffer


def _main(command: str, *arguments: str) -> None:
    if command == "produce":
        lender = Lender()
        lender.parts["huge"] = pa.py_buffer(np.ones(256 * MIB, np.uint8))
        print(lender.server.port, lender.server.token.hex(), flush=True)
        sys.stdin.read()
    else:
        port, token, ticket = arguments
        receiver = UcxReceiver(UcxLoop("ucx-rank"), "127.0.0.1", int(port), bytes.fromhex(token), ReceiveBuffers())
        print("connected", flush=True)
        while True:
            receiver.fetch(ticket, 100).release()


if __name__ == "__main__":
    _main(*sys.argv[1:])
