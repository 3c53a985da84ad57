"""The thread that relays a rank's plans ends with the rank, also where that was gone before the thread began."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from headrace.trainer.loading.relay import Relay
from headrace.v1 import sessions_pb2, sessions_pb2_grpc

PATIENCE_S = 20


class Silent(sessions_pb2_grpc.SessionsServicer):
    """A reorder service that has nothing to tell. It notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.left = threading.Event()

    def Relay(self, requests: Iterator[sessions_pb2.RelayRequest], context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        for request in requests:
            self.asked += [f"listen {session}" for session in request.listen] + [f"leave {session}" for session in request.leave]
            if request.leave:
                self.left.set()
        yield from ()


class Rank:
    """What gRPC tells the relay of a rank's call."""

    def __init__(self, *, gone: bool) -> None:
        self._gone = gone
        self.callbacks: list[Callable[[], None]] = []

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """As `grpc.RpcContext.add_callback`: false, without ever calling it, where the call is over."""
        if not self._gone:
            self.callbacks.append(callback)
        return not self._gone


@pytest.fixture
def service() -> Iterator[tuple[Silent, Relay]]:
    with ThreadPoolExecutor(2) as pool:
        silent, server = Silent(), grpc.server(pool)
        sessions_pb2_grpc.add_SessionsServicer_to_server(silent, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield silent, Relay(channel)
        server.stop(None).wait()


@pytest.mark.parametrize("gone", [False, True])
def test_a_thread_that_relays_plans_ends_when_its_rank_has_gone(service: tuple[Silent, Relay], gone: bool) -> None:
    silent, relay = service
    rank, told = Rank(gone=gone), list[bytes]()
    plans = threading.Thread(
        target=lambda: told.extend(relay.Plans(sessions_pb2.PlansRequest(session="job/0/x"), rank)),  # type: ignore[arg-type]
        daemon=True,
    )
    plans.start()
    if not gone:
        while not rank.callbacks:
            plans.join(0.01)
        rank.callbacks[0]()
    plans.join(PATIENCE_S)
    assert not plans.is_alive()
    assert silent.left.wait(PATIENCE_S), "the service goes on telling a session that nobody reads"
    assert (silent.asked, told) == (["listen job/0/x", "leave job/0/x"], [])
