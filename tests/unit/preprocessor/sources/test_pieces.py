"""Pieces of remote files in memory: bounded, found wherever they begin, and forgotten once they have failed."""

from __future__ import annotations

import pytest

from headrace.preprocessor.sources.pieces import STALE_S, Pieces


def test_what_is_inside_of_a_piece_is_found() -> None:
    pieces = Pieces(1000)
    pieces.put(1, 100, bytes(range(50)))
    pieces.put(1, 110, b"other")
    assert pieces.get(1, 100, 150) == bytes(range(50))
    assert pieces.get(1, 112, 140) == bytes(range(12, 40)), "behind the beginning of a shorter one"
    assert pieces.get(1, 120, 151) is pieces.get(2, 100, 101) is pieces.get(1, 99, 101) is None


def test_there_are_never_more_bytes_than_allowed_and_unread_ones_stay() -> None:
    pieces = Pieces(100, now_s=lambda: 0.0)
    for start in range(0, 200, 20):
        pieces.put(1, start, bytes(20))
    assert [pieces.covers(1, start, start + 20) for start in range(0, 200, 20)] == [True] * 5 + [False] * 5
    assert pieces.get(1, 20, 40) == bytes(20)
    pieces.put(1, 500, bytes(20))
    assert not pieces.covers(1, 20, 40)
    assert pieces.covers(1, 500, 520)


def test_what_nobody_reads_makes_room_after_a_while() -> None:
    now_s = [0.0]
    pieces = Pieces(100, now_s=lambda: now_s[0])
    pieces.put(1, 0, bytes(100))
    assert pieces.promise(1, 200, 250) is None
    now_s[0] = STALE_S + 1
    assert pieces.promise(1, 200, 250) is not None
    assert not pieces.covers(1, 0, 100)


def test_what_is_on_its_way_is_waited_for_and_a_failure_is_told_once() -> None:
    pieces = Pieces(100)
    content = pieces.promise(1, 0, 10)
    assert content is not None
    content.set_exception(OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        pieces.get(1, 2, 4)
    assert pieces.get(1, 2, 4) is None


def test_a_file_that_is_closed_is_forgotten() -> None:
    pieces = Pieces(100)
    for file in (1, 2):
        pieces.put(file, 0, bytes(50))
    pieces.forget(1)
    pieces.put(3, 0, bytes(50))
    assert pieces.get(1, 0, 1) is None
    assert pieces.get(2, 0, 1) == pieces.get(3, 0, 1) == b"\0"


def test_a_file_may_be_forgotten_by_the_thread_that_adds_a_piece() -> None:
    """As the garbage collector does, which runs finalizers wherever something is allocated."""

    def now_s() -> float:
        pieces.forget(1)
        return 0.0

    pieces = Pieces(100, now_s)
    pieces.put(2, 0, bytes(50))
    pieces.put(1, 0, bytes(50))
    pieces.put(3, 0, bytes(50))
    assert pieces.get(1, 0, 1) is None
    assert pieces.get(2, 0, 1) == pieces.get(3, 0, 1) == b"\0"
