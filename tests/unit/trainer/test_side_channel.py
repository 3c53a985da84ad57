"""How the ranks of a job find each other, and what is said of those that do not come or were started otherwise."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest

from headrace.errors import UserError
from headrace.processes import free_port
from headrace.trainer.side_channel import SideChannel

COME_S = 60.0


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """Where the ranks of a test meet."""
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return port


@pytest.fixture
def start() -> Iterator[Callable[..., SideChannel]]:
    channels = []

    def start(rank: int, num_ranks: int) -> SideChannel:
        channels.append(SideChannel(rank, num_ranks))
        return channels[-1]

    yield start
    for channel in channels:  # rank 0, which hosts the store of the others, was started last
        channel.close()


def until(rank: SideChannel, condition: Callable[[SideChannel], bool]) -> None:
    """Wait until a rank's news make the condition true."""
    deadline = time.monotonic() + COME_S
    while not condition(rank):
        assert time.monotonic() < deadline
        rank.await_news(COME_S)


def test_ranks_that_have_not_come_are_waited_for_in_words(port: int, start: Callable[..., SideChannel]) -> None:
    second = start(1, 3)
    assert second.waits_for.startswith(f"nobody answers at 127.0.0.1:{port}, where rank 0 is to be: start it")
    ranks = [second, start(0, 3)]
    words = f"2 of 3 ranks are at 127.0.0.1:{port}: start the others with the same MASTER_ADDR"
    for rank in ranks:
        until(rank, lambda rank: rank.waits_for.startswith(words))


def test_nobody_is_waited_for_once_all_are_here(port: int, start: Callable[..., SideChannel]) -> None:
    ranks = [start(rank, 2) for rank in (1, 0)]
    for rank in ranks:
        until(rank, lambda rank: not rank.waits_for)
        assert rank.store() is not None


def test_a_port_that_is_taken_is_said_at_once(port: int, start: Callable[..., SideChannel]) -> None:
    with socket.create_server(("127.0.0.1", port)):
        first = start(0, 2)
        with pytest.raises(UserError, match=f"rank 0 cannot listen at 127.0.0.1:{port}, .* give all ranks another MASTER_PORT"):
            first.store()
    assert first.waits_for == ""


def test_ranks_that_were_told_of_different_numbers_do_not_wait_for_more(port: int, start: Callable[..., SideChannel]) -> None:
    ranks = {number: start(rank, number) for rank, number in ((1, 3), (0, 2))}
    said = {}
    for number, rank in ranks.items():
        try:
            rank.store()
        except UserError as err:
            said[number] = str(err)
    [(own, sentence)] = said.items()
    assert sentence == (
        f"this rank was started with WORLD_SIZE {own}, and another one with WORLD_SIZE {5 - own}: start all ranks with the same"
    )


@pytest.mark.parametrize("value", ["http", "0", "70000"])
def test_what_is_no_port_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MASTER_PORT", value)
    with pytest.raises(UserError, match=f"MASTER_PORT is '?{value}'? in the environment"):
        SideChannel(0, 2)
