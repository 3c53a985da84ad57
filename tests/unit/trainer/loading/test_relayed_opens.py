"""A host's relay opens the sessions of its ranks over its stream, also beside a reorder service that cannot do that yet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace import rpc
from headrace.trainer.loading.relay import Relay
from headrace.v1 import sessions_pb2, sessions_pb2_grpc

PATIENCE_S = 20.0
NUM_RANKS = 4

Answer = Callable[[sessions_pb2.RelayRequest], sessions_pb2.RelayReply | None]


class Service(sessions_pb2_grpc.SessionsServicer):
    """A reorder service that answers a relay's messages as it is told to. It notes how it was asked."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.asked: list[str] = []

    def Open(self, request: sessions_pb2.OpenRequest, context: grpc.ServicerContext) -> sessions_pb2.OpenReply:  # noqa: N802
        self.asked.append("call")
        return sessions_pb2.OpenReply(session=f"{request.job}/{request.rank}")

    def Relay(self, requests: Iterator[sessions_pb2.RelayRequest], context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        for request in requests:
            self.asked += ["stream"] * len(request.opens)
            if (reply := self._answer(request)) is None:
                context.abort(grpc.StatusCode.UNAVAILABLE, "this reorder service has stopped leading")
            else:
                yield reply


@pytest.fixture
def ranks(tmp_path: Path) -> Callable[[Answer], AbstractContextManager[tuple[Service, sessions_pb2_grpc.SessionsStub]]]:
    """Starts a service and the relay of a host beside it, and gives what the ranks of the host reach it by."""

    @contextmanager
    def start(answer: Answer) -> Iterator[tuple[Service, sessions_pb2_grpc.SessionsStub]]:
        with ThreadPoolExecutor(8) as pool:
            service, server = Service(answer), grpc.server(pool)
            sessions_pb2_grpc.add_SessionsServicer_to_server(service, server)
            port = server.add_insecure_port("127.0.0.1:0")
            server.start()
            socket = tmp_path / "relay.sock"
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, rpc.local_channel(socket) as local:
                Relay(channel).serve(f"unix:{socket}")
                yield service, sessions_pb2_grpc.SessionsStub(local)
            server.stop(None).wait()

    return start


def open_all(stub: sessions_pb2_grpc.SessionsStub) -> list[str]:
    """Have all ranks of the host ask at once; return their sessions."""
    begin = threading.Barrier(NUM_RANKS)

    def ask(rank: int) -> str:
        begin.wait()
        return str(stub.Open(sessions_pb2.OpenRequest(job="job", rank=rank), timeout=PATIENCE_S).session)

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        return list(pool.map(ask, range(NUM_RANKS)))


SESSIONS = [f"job/{rank}" for rank in range(NUM_RANKS)]


def opened(request: sessions_pb2.RelayRequest) -> sessions_pb2.RelayReply:
    """What a service answers: the calls in another order than that of the ranks."""
    reply = sessions_pb2.RelayReply(opens=bool(request.listen))
    reply.ends.extend(sessions_pb2.RelayedEnd(session=session, status=5) for session in request.listen)
    for asked in reversed(request.opens):
        reply.opened.add(call=asked.call, reply=sessions_pb2.OpenReply(session=f"{asked.request.job}/{asked.request.rank}"))
    return reply


def test_the_ranks_ask_over_the_stream_and_each_has_its_own_answer(ranks: Any) -> None:
    with ranks(opened) as (service, stub):
        assert open_all(stub) == SESSIONS
        assert service.asked == ["stream"] * NUM_RANKS


def test_beside_a_service_of_an_older_release_they_are_calls_of_their_own(ranks: Any) -> None:
    def only_ends(request: sessions_pb2.RelayRequest) -> sessions_pb2.RelayReply:
        return sessions_pb2.RelayReply(ends=[sessions_pb2.RelayedEnd(session=session, status=5) for session in request.listen])

    with ranks(only_ends) as (service, stub):
        assert open_all(stub) == SESSIONS
        assert open_all(stub) == SESSIONS
        assert service.asked.count("call") == 2 * NUM_RANKS
        assert service.asked.count("stream") <= NUM_RANKS  # once it is known, nobody asks in vain any more


def test_a_refusal_reaches_the_rank_with_its_status_and_sentence(ranks: Any) -> None:
    def refuse(request: sessions_pb2.RelayRequest) -> sessions_pb2.RelayReply:
        return sessions_pb2.RelayReply(
            opened=[sessions_pb2.RelayedOpenReply(call=asked.call, status=10, error="another one") for asked in request.opens]
        )

    with ranks(refuse) as (_, stub), pytest.raises(grpc.RpcError) as refused:
        stub.Open(sessions_pb2.OpenRequest(job="job"), timeout=PATIENCE_S)
    assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.ABORTED, "another one")


def test_a_stream_that_breaks_is_told_to_the_rank_which_asks_again_over_a_new_one(ranks: Any) -> None:
    breaks = iter([True, False])
    with ranks(lambda request: None if next(breaks, False) else opened(request)) as (service, stub):
        assert (
            stub.Open(sessions_pb2.OpenRequest(job="job", rank=3), timeout=PATIENCE_S).session == "job/3"
        )  # gRPC has retried it
        assert service.asked == ["stream", "stream"]


def test_a_service_that_does_not_answer_keeps_a_rank_no_longer_than_it_wants_to_wait(ranks: Any) -> None:
    with ranks(lambda _: sessions_pb2.RelayReply()) as (_, stub), pytest.raises(grpc.RpcError) as refused:
        stub.Open(sessions_pb2.OpenRequest(job="job"), timeout=0.3)
    assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
