"""Parts through UCX that come too late, and servers and ranks that go."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headrace.errors import UnavailableError
from headrace.transport.flight_server import Loan
from headrace.transport.ucx import UcxReceiver
from headrace.transport.ucx_buffers import ReceiveBuffers
from headrace.transport.ucx_library import UcxError
from headrace.transport.ucx_loop import UcxLoop
from tests.unit.proto.transport.ucx_world import MIB, PART, Lender, connect, contents, loan, never, payload

# -- time limits ------------------------------------------------------------------------------------------------------


def test_what_the_consumer_gives_up_the_producer_stops_to_prepare(lender: Lender, receiver: UcxReceiver) -> None:
    with pytest.raises(UnavailableError, match=r"part stuck did not come within 1 s"):
        receiver.fetch("stuck", 1.0)
    assert isinstance(lender.wait_for_end("stuck"), asyncio.CancelledError)


def test_what_is_given_up_before_the_producer_has_begun_is_forgotten(lender: Lender, receiver: UcxReceiver) -> None:
    begun = threading.Event()
    lender.begin(lambda: (begun.set(), time.sleep(0.5)))  # the loop takes the question and its end in one turn
    assert begun.wait(20)
    with pytest.raises(UnavailableError, match="did not come"):
        receiver.fetch("stuck", 0.05)
    receiver.fetch("part", 20).release()
    assert lender.wait_for_end("part") is None
    assert lender.call(lambda: lender.server.num_asked) == 0


def test_a_part_that_comes_too_late_is_taken_and_its_buffer_used_again(
    lender: Lender, receiver: UcxReceiver, buffers: ReceiveBuffers
) -> None:
    late = contents(3 * MIB)

    async def send_in_spite() -> Loan:
        with contextlib.suppress(asyncio.CancelledError):
            await never()
        return loan(late)

    lender.scripts["late"] = send_in_spite
    lender.parts["next"] = contents(9)
    with pytest.raises(UnavailableError, match="did not come"):
        receiver.fetch("late", 1.0)
    assert lender.wait_for_end("late") is None
    receiver.fetch("next", 20).release()
    assert buffers.idle_bytes == 3 * MIB, "one block, for both"


def test_a_rank_that_stops_in_the_middle_of_a_part_does_not_hold_it_forever(make_lender: Any, spawn_ucx: Any) -> None:
    lender = make_lender(send_timeout_s=0.3)
    sending = threading.Event()
    go_on = asyncio.Event()

    async def send_when_stopped() -> Loan:
        sending.set()
        await go_on.wait()
        return loan(contents(32 * MIB))

    lender.scripts["part"] = send_when_stopped
    rank, _ = spawn_ucx("consume", str(lender.server.port), lender.server.token.hex(), "part")
    assert sending.wait(20)
    os.kill(rank.pid, signal.SIGSTOP)
    lender.call(go_on.set)
    assert isinstance(lender.wait_for_end("part"), UcxError)


# -- peers that go ----------------------------------------------------------------------------------------------------


def test_a_killed_producer_fails_what_is_awaited_and_another_goes_on(
    spawn_ucx: Any, ucx: UcxLoop, receiver: UcxReceiver, buffers: ReceiveBuffers
) -> None:
    for tickets in (["stuck"] * 3, ["huge"] * 3, ["huge", "stuck", "part"]):
        process, (port, token) = spawn_ucx("produce")
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
        assert payload(receiver.fetch("part", 20)).equals(PART)


@pytest.mark.parametrize("is_sending", [False, True])
def test_a_killed_rank_holds_nothing(lender: Lender, spawn_ucx: Any, is_sending: bool) -> None:
    begun, stopped = threading.Event(), asyncio.Event()

    async def begin() -> Loan:
        begun.set()
        if not is_sending:
            return await never()
        await stopped.wait()
        return loan(contents(32 * MIB))

    lender.scripts["part"] = begin
    rank, _ = spawn_ucx("consume", str(lender.server.port), lender.server.token.hex(), "part")
    assert begun.wait(20)
    os.kill(rank.pid, signal.SIGSTOP)
    lender.call(stopped.set)
    rank.kill()
    assert isinstance(lender.wait_for_end("part"), UcxError | asyncio.CancelledError)
    assert lender.call(lambda: lender.server.num_asked) == 0


def test_closing_either_end_fails_what_is_awaited(lender: Lender, buffers: ReceiveBuffers) -> None:
    begun = threading.Semaphore(0)

    async def begin() -> Loan:
        begun.release()
        return await never()

    lender.scripts["stuck"] = begin
    with ThreadPoolExecutor(2) as pool:
        for close in ("receiver", "loop", "server"):
            loop = UcxLoop("ucx-short")
            receiver = connect(loop, lender.server, buffers)
            fetch = pool.submit(receiver.fetch, "stuck", 100)
            assert begun.acquire(timeout=20)
            {"receiver": receiver.close, "loop": loop.close, "server": lender.stop}[close]()
            assert isinstance(fetch.exception(timeout=20), UcxError)
            with pytest.raises(UcxError):
                receiver.fetch("stuck", 20)
            loop.close()
