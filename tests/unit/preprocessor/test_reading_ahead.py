"""Work that waits is done side by side, in order of its results, and a stuck thread holds up nobody else's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.preprocessor import reading_ahead
from headrace.preprocessor.reading_ahead import MOST_AHEAD, in_order

PATIENCE_S = 30


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(reading_ahead, "_threads", pool)
        yield


def test_results_come_in_order_and_as_many_wait_as_may() -> None:
    together = threading.Barrier(MOST_AHEAD, timeout=PATIENCE_S)

    def work(item: int) -> int:
        together.wait()
        return 2 * item

    assert list(in_order(range(4 * MOST_AHEAD), work)) == [(item, 2 * item) for item in range(4 * MOST_AHEAD)]


def test_no_more_are_begun_than_may_be_in_memory() -> None:
    begun = []
    results = in_order(range(100), begun.append)
    next(results)
    assert len(begun) <= MOST_AHEAD
    results.close()  # type: ignore[attr-defined]


def test_an_error_is_raised_in_its_turn() -> None:
    def work(item: int) -> float:
        return 1 / (3 - item)

    results = in_order(range(6), work)
    assert [next(results)[0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        next(results)


@pytest.mark.usefixtures("one_thread")
def test_a_stuck_thread_holds_up_nobody_else() -> None:
    gate = threading.Event()
    stuck = reading_ahead.Begun(lambda: gate.wait(PATIENCE_S))
    assert [result for _, result in in_order(range(20), lambda item: item)] == list(range(20))
    gate.set()
    assert stuck.result()
