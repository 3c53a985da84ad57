"""Streams between two nodes, which are threads of this process here: who gets in, and what ends a wait."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import pytest

from headrace.trainer.recovery.state_streams import Door, Stream, Streams, address_behind, open_streams

PATIENCE_S = 60.0
LONG = bytes(range(256)) * (1 << 16)  # more than the system holds of what is on its way


class CutError(Exception):
    """What a check raises here."""


@pytest.fixture
def doors() -> Iterator[list[Door]]:
    doors = [Door("127.0.0.1") for _ in range(2)]
    yield doors
    for door in doors:
        door.close()


@contextmanager
def beside(run: Callable[[], object]) -> Iterator[Future[object]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(run)


def streams(
    doors: list[Door],
    rank: int,
    targets: Collection[int] = (),
    sources: Collection[int] = (),
    check: Callable[[], None] = lambda: None,
    timeout_s: float = PATIENCE_S,
) -> AbstractContextManager[Streams]:
    told = [door.told for door in doors]
    return open_streams(doors[rank], told, rank, targets=targets, sources=sources, timeout_s=timeout_s, check=check)


def test_both_may_send_at_the_same_time(doors: list[Door]) -> None:
    def exchange(rank: int) -> bytes:
        came = bytearray(len(LONG))
        with streams(doors, rank, [1 - rank], [1 - rank]) as opened, beside(lambda: opened.to[1 - rank].send(LONG)) as sent:
            opened.of[1 - rank].receive(memoryview(came))
            sent.result(PATIENCE_S)
        return bytes(came)

    with beside(lambda: exchange(1)) as other:
        assert exchange(0) == LONG
        assert other.result(PATIENCE_S) == LONG


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: trainer\r\n\r\n", bytes(16) + (1).to_bytes(4)])
def test_a_stranger_is_sent_away_and_the_other_node_gets_in(doors: list[Door], said: bytes) -> None:
    with socket.create_connection(address_behind(doors[0].told)) as stranger:
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)

        def send() -> None:
            with streams(doors, 1, [0]) as opened:
                opened.to[0].send(b"state")

        came = bytearray(5)
        with beside(send), streams(doors, 0, (), [1]) as opened:
            opened.of[1].receive(memoryview(came))
        assert came == b"state"
        stranger.settimeout(PATIENCE_S)
        assert was_closed(stranger)


def was_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # what it said was not read to the end
        return True


def test_who_is_gone_in_the_middle_ends_the_wait(doors: list[Door]) -> None:
    def send_half() -> None:
        with streams(doors, 1, [0]) as opened:
            opened.to[0].send(LONG[: len(LONG) // 2])

    with beside(send_half), streams(doors, 0, (), [1]) as opened, pytest.raises(ConnectionError, match="closed by peer"):
        opened.of[1].receive(memoryview(bytearray(len(LONG))))


def test_who_takes_nothing_any_more_ends_what_is_sent(doors: list[Door]) -> None:
    def take_nothing() -> None:
        with streams(doors, 1, (), [0]):
            pass

    with beside(take_nothing), streams(doors, 0, [1]) as opened, pytest.raises(ConnectionError):
        send_on(opened.to[1])


def send_on(stream: Stream) -> None:
    for _ in range(100):
        stream.send(LONG)


def test_a_wait_for_what_does_not_come_has_an_end(doors: list[Door]) -> None:
    with pytest.raises(ConnectionError, match="no stream of rank 1"), streams(doors, 0, (), [1], timeout_s=0.05):
        pass


def test_a_cut_ends_the_wait_for_another_node(doors: list[Door]) -> None:
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise CutError

    with pytest.raises(CutError), streams(doors, 0, (), [1], check):
        pass


def test_at_a_door_that_is_shut_nobody_waits(doors: list[Door]) -> None:
    """Neither who has knocked before, nor who knocks now."""
    with streams(doors, 1, [0]) as opened:
        doors[0].shut()
        with pytest.raises(ConnectionError):
            send_on(opened.to[0])
    with pytest.raises(ConnectionError, match="refused"), streams(doors, 1, [0]):
        pass
    with pytest.raises(ConnectionError), streams(doors, 0, (), [1]):
        pass


def test_the_end_of_streams_ends_a_wait_of_another_thread(doors: list[Door]) -> None:
    with (
        streams(doors, 1, [0]),
        streams(doors, 0, (), [1]) as opened,
        beside(lambda: opened.of[1].receive(memoryview(bytearray(1)))) as waiting,
    ):
        opened.end()
        with pytest.raises(ConnectionError):
            waiting.result(PATIENCE_S)
