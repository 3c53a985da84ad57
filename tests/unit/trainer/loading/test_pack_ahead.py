"""One microbatch is packed ahead, and only where nobody has to wait for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from headrace.trainer.loading.pack_ahead import PackAhead

PATIENCE_S = 10.0


class Parts:
    """Tickets that have come, and what was packed of them by which thread."""

    def __init__(self) -> None:
        self.ready: set[str] = set()
        self.packed: list[tuple[str, ...]] = []
        self.threads: list[str] = []
        self.seen = threading.Semaphore(0)
        self.error: Exception | None = None

    def pack(self, tickets: Sequence[str]) -> str:
        self.packed.append(tuple(tickets))
        self.threads.append(threading.current_thread().name)
        self.seen.release()
        if self.error is not None:
            raise self.error
        return "+".join(tickets)

    def have_arrived(self, tickets: Sequence[str]) -> bool:
        return self.ready.issuperset(tickets)


@pytest.fixture
def parts() -> Parts:
    return Parts()


@pytest.fixture
def packing(parts: Parts) -> Iterator[PackAhead[Sequence[str], str]]:
    packing = PackAhead(parts.pack, parts.have_arrived)
    yield packing
    packing.close()


def test_what_was_not_announced_is_packed_by_its_consumer(parts: Parts, packing: PackAhead[Sequence[str], str]) -> None:
    assert packing.take(["a", "b"]) == "a+b"
    assert parts.threads == [threading.current_thread().name]


def test_what_is_announced_is_packed_at_once_where_its_parts_are_there(
    parts: Parts, packing: PackAhead[Sequence[str], str]
) -> None:
    parts.ready |= {"a", "b"}
    packing.announce(["a", "b"])
    assert parts.seen.acquire(timeout=PATIENCE_S)
    assert packing.take(["a", "b"]) == "a+b"
    assert parts.packed == [("a", "b")]
    assert parts.threads[0].startswith("pack")


def test_it_begins_with_the_last_part_that_comes(parts: Parts, packing: PackAhead[Sequence[str], str]) -> None:
    packing.announce(["a", "b"])
    parts.ready.add("a")
    packing.start_if_ready()
    assert parts.packed == []
    parts.ready.add("b")
    packing.start_if_ready()
    assert parts.seen.acquire(timeout=PATIENCE_S)
    packing.start_if_ready()
    assert packing.take(["a", "b"]) == "a+b"
    assert parts.packed == [("a", "b")]


def test_the_consumer_does_not_wait_for_the_other_thread_where_a_part_is_missing(
    parts: Parts, packing: PackAhead[Sequence[str], str]
) -> None:
    packing.announce(["a"])
    assert packing.take(["a"]) == "a"
    parts.ready.add("a")
    packing.start_if_ready()
    assert parts.threads == [threading.current_thread().name]


def test_another_microbatch_than_the_announced_one_is_its_own(parts: Parts, packing: PackAhead[Sequence[str], str]) -> None:
    parts.ready.add("a")
    packing.announce(["a"])
    assert packing.take(["b"]) == "b"


def test_an_error_is_the_consumers(parts: Parts, packing: PackAhead[Sequence[str], str]) -> None:
    parts.ready.add("a")
    parts.error = ValueError("damaged")
    packing.announce(["a"])
    with pytest.raises(ValueError, match="damaged"):
        packing.take(["a"])


def test_nothing_begins_after_the_end(parts: Parts, packing: PackAhead[Sequence[str], str]) -> None:
    packing.announce(["a"])
    packing.close()
    parts.ready.add("a")
    packing.start_if_ready()
    assert parts.packed == []
