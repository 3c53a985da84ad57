"""Parts through UCX, from a real server to real receivers over loopback: how they come, and what breaks on the way.

As a script, `produce` is a server in a process of its own, and `consume PORT TOKEN TICKET` a rank that can be killed or stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headrace.errors import HeadraceError, NotFoundError, PermissionDeniedError, UnavailableError
from headrace.transport.flight_server import Loan
from headrace.transport.ucx import UcxReceiver
from headrace.transport.ucx_buffers import ReceiveBuffers
from headrace.transport.ucx_library import UcxError
from headrace.transport.ucx_loop import UcxLoop
from headrace.transport.ucx_server import UcxServer
from headrace.v1 import payload_pb2

MIB = 1 << 20


def contents(num_bytes: int, seed: int = 0) -> pa.Buffer:
    return pa.py_buffer(np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8))


Script = Callable[[], Coroutine[Any, Any, Loan]]


def loan(data: pa.Buffer) -> Loan:
    return Loan(header=payload_pb2.PartHeader(num_bytes=data.size, num_samples=3), data=data)


async def never() -> Loan:
    await asyncio.Event().wait()
    raise AssertionError


class Producer:
    """Lends `parts`, raises `errors`, or does as `scripts` say. On an event loop of its own, in a thread."""

    def __init__(self, **options: Any) -> None:
        self.parts: dict[str, pa.Buffer] = {}
        self.errors: dict[str, HeadraceError] = {}
        self.scripts: dict[str, Script] = {}
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


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def make_producer(stack: ExitStack) -> Callable[..., Producer]:
    def make(**options: Any) -> Producer:
        producer = Producer(**options)
        stack.callback(producer.stop)
        return producer

    return make


@pytest.fixture
def producer(make_producer: Callable[..., Producer]) -> Producer:
    return make_producer()


@pytest.fixture
def ucx(stack: ExitStack) -> UcxLoop:
    loop = UcxLoop("ucx-test")
    stack.callback(loop.close)
    return loop


@pytest.fixture
def buffers() -> ReceiveBuffers:
    return ReceiveBuffers()


@pytest.fixture
def receiver(producer: Producer, ucx: UcxLoop, buffers: ReceiveBuffers) -> UcxReceiver:
    return UcxReceiver(ucx, "127.0.0.1", producer.server.port, producer.server.token, buffers)


@pytest.fixture
def spawn(stack: ExitStack) -> Callable[..., tuple[subprocess.Popen[str], list[str]]]:
    def start(*arguments: str) -> tuple[subprocess.Popen[str], list[str]]:
        command = [sys.executable, __file__, *arguments]
        process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        stack.callback(process.kill)
        assert process.stdout is not None
        return process, process.stdout.readline().split()

    return start


# -- how parts come ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [1, 700, 8 << 10, 100_000, 300_000, MIB, 5 * MIB + 7])
def test_a_part_comes_as_it_was_sent_by_every_protocol_of_ucx(producer: Producer, receiver: UcxReceiver, num_bytes: int) -> None:
    producer.parts["part"] = contents(num_bytes)
    delivery = receiver.fetch("part", 20)
    assert delivery.buffer.equals(contents(num_bytes))
    assert (delivery.header.num_bytes, delivery.header.num_samples) == (num_bytes, 3)
    assert not delivery.buffer.is_mutable
    assert producer.wait_for_end("part") is None


def test_the_lanes_are_told(receiver: UcxReceiver, producer: Producer) -> None:
    producer.parts["part"] = contents(9)
    assert receiver.lanes
    assert all(re.fullmatch(r"\w+/[\w.:-]+", lane) for lane in receiver.lanes)
    assert receiver.fetch("part", 20).transport == receiver.transport
    assert receiver.transport == "ucx:" + "+".join(sorted({lane.split("/")[0] for lane in receiver.lanes}))


def test_a_released_buffer_takes_the_next_part_and_a_held_one_does_not(
    producer: Producer, receiver: UcxReceiver, buffers: ReceiveBuffers
) -> None:
    producer.parts |= {str(k): contents(MIB, k) for k in range(3)}
    first = receiver.fetch("0", 20)
    second = receiver.fetch("1", 20)
    address = first.buffer.address
    first.release()
    first.release()
    third = receiver.fetch("2", 20)
    assert third.buffer.address == address
    assert second.buffer.equals(contents(MIB, 1))
    assert third.buffer.equals(contents(MIB, 2))
    receiver.close()
    assert second.buffer.equals(contents(MIB, 1)), "deliveries outlive the connection"
    second.release()
    third.release()
    assert buffers.idle_bytes == 2 * MIB


def test_many_threads_get_each_its_own_part(producer: Producer, receiver: UcxReceiver, buffers: ReceiveBuffers) -> None:
    sizes = [(37 * k) ** 2 * 11 + 1 for k in range(40)]  # 1 byte to 23 MB
    producer.parts |= {str(k): contents(size, k) for k, size in enumerate(sizes)}

    def fetch(k: int) -> bool:
        delivery = receiver.fetch(str(k), 60)
        try:
            return bool(delivery.buffer.equals(producer.parts[str(k)]))
        finally:
            delivery.release()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(fetch, [*range(40), *range(40)]))


def test_the_producer_keeps_a_part_until_it_is_sent(producer: Producer, receiver: UcxReceiver) -> None:
    payload = np.full(4 * MIB, 7, np.uint8)
    producer.parts["part"] = pa.py_buffer(payload)
    producer.returned["part"] = lambda: payload.fill(9)
    assert (np.frombuffer(receiver.fetch("part", 20).buffer, np.uint8) == 7).all()
    assert producer.wait_for_end("part") is None
    assert (payload == 9).all()


@pytest.mark.parametrize("error", [NotFoundError("no such part"), PermissionDeniedError("foreign"), UnavailableError("later")])
def test_errors_come_as_the_producer_raised_them(producer: Producer, receiver: UcxReceiver, error: HeadraceError) -> None:
    producer.errors["part"] = error
    with pytest.raises(type(error), match=str(error)):
        receiver.fetch("part", 20)
    producer.parts["other"] = contents(9)
    assert receiver.fetch("other", 20).buffer.equals(contents(9)), "the connection is as good as before"


# -- time limits ------------------------------------------------------------------------------------------------------


def test_what_the_consumer_gives_up_the_producer_stops_to_prepare(producer: Producer, receiver: UcxReceiver) -> None:
    producer.scripts["stuck"] = never
    with pytest.raises(UnavailableError, match=r"part stuck did not come within 0.05 s"):
        receiver.fetch("stuck", 0.05)
    assert isinstance(producer.wait_for_end("stuck"), asyncio.CancelledError)


def test_a_part_that_comes_too_late_is_taken_and_its_buffer_used_again(
    producer: Producer, receiver: UcxReceiver, buffers: ReceiveBuffers
) -> None:
    late = contents(3 * MIB)

    async def send_in_spite() -> Loan:
        with contextlib.suppress(asyncio.CancelledError):
            await never()
        return loan(late)

    producer.scripts["late"] = send_in_spite
    producer.parts["next"] = contents(9)
    with pytest.raises(UnavailableError, match="did not come"):
        receiver.fetch("late", 0.05)
    assert producer.wait_for_end("late") is None
    receiver.fetch("next", 20).release()
    assert buffers.idle_bytes == 3 * MIB, "one block, for both"


def test_a_rank_that_stops_in_the_middle_of_a_part_does_not_hold_it_forever(make_producer: Any, spawn: Any) -> None:
    producer = make_producer(send_timeout_s=0.3)
    sending = threading.Event()
    go_on = asyncio.Event()

    async def send_when_stopped() -> Loan:
        sending.set()
        await go_on.wait()
        return loan(contents(32 * MIB))

    producer.scripts["part"] = send_when_stopped
    rank, _ = spawn("consume", str(producer.server.port), producer.server.token.hex(), "part")
    assert sending.wait(20)
    os.kill(rank.pid, signal.SIGSTOP)
    producer.call(go_on.set)
    assert isinstance(producer.wait_for_end("part"), UcxError)


# -- peers that go ----------------------------------------------------------------------------------------------------


def test_a_killed_producer_fails_what_is_awaited_and_another_goes_on(
    spawn: Any, ucx: UcxLoop, producer: Producer, receiver: UcxReceiver, buffers: ReceiveBuffers
) -> None:
    producer.parts["part"] = contents(MIB)
    for tickets in (["stuck"] * 3, ["huge"] * 3, ["huge", "stuck", "part"]):
        process, (port, token) = spawn("produce")
        doomed = UcxReceiver(ucx, "127.0.0.1", int(port), bytes.fromhex(token), buffers)
        doomed.fetch("part", 20).release()
        with ThreadPoolExecutor(3) as pool:
            fetches = [pool.submit(doomed.fetch, ticket, 100) for ticket in tickets]
            process.kill()
            for fetch in fetches:
                error = fetch.exception(timeout=20)
                assert error is None or isinstance(error, UcxError)
                if error is None:
                    fetch.result().release()
        with pytest.raises(UcxError, match="is lost"):
            doomed.fetch("part", 20)
        assert receiver.fetch("part", 20).buffer.equals(contents(MIB))


@pytest.mark.parametrize("is_sending", [False, True])
def test_a_killed_rank_holds_nothing(producer: Producer, spawn: Any, is_sending: bool) -> None:
    begun, stopped = threading.Event(), asyncio.Event()

    async def begin() -> Loan:
        begun.set()
        if not is_sending:
            return await never()
        await stopped.wait()
        return loan(contents(32 * MIB))

    producer.scripts["part"] = begin
    rank, _ = spawn("consume", str(producer.server.port), producer.server.token.hex(), "part")
    assert begun.wait(20)
    os.kill(rank.pid, signal.SIGSTOP)
    producer.call(stopped.set)
    rank.kill()
    assert isinstance(producer.wait_for_end("part"), UcxError | asyncio.CancelledError)
    assert producer.call(lambda: producer.server.num_asked) == 0


def test_closing_either_end_fails_what_is_awaited(producer: Producer, ucx: UcxLoop, buffers: ReceiveBuffers) -> None:
    begun = threading.Semaphore(0)

    async def begin() -> Loan:
        begun.release()
        return await never()

    producer.scripts["stuck"] = begin
    with ThreadPoolExecutor(2) as pool:
        for close in ("receiver", "loop", "server"):
            loop = UcxLoop("ucx-short")
            receiver = UcxReceiver(loop, "127.0.0.1", producer.server.port, producer.server.token, buffers)
            fetch = pool.submit(receiver.fetch, "stuck", 100)
            assert begun.acquire(timeout=20)
            {"receiver": receiver.close, "loop": loop.close, "server": producer.stop}[close]()
            assert isinstance(fetch.exception(timeout=20), UcxError)
            with pytest.raises(UcxError):
                receiver.fetch("stuck", 20)
            loop.close()


def _main(command: str, *arguments: str) -> None:
    if command == "produce":
        producer = Producer()
        producer.parts |= {"part": contents(MIB), "huge": pa.py_buffer(np.ones(256 * MIB, np.uint8))}
        producer.scripts["stuck"] = never
        print(producer.server.port, producer.server.token.hex(), flush=True)
        sys.stdin.read()
    else:
        port, token, ticket = arguments
        receiver = UcxReceiver(UcxLoop("ucx-rank"), "127.0.0.1", int(port), bytes.fromhex(token), ReceiveBuffers())
        print("connected", flush=True)
        while True:
            receiver.fetch(ticket, 100).release()


if __name__ == "__main__":
    _main(*sys.argv[1:])
