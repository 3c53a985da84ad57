"""Fetching from real preprocessors' stores: what happens when one of them hangs, or the consumer does."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from headrace.errors import SupersededError, UnavailableError
from headrace.quarantine import Reason, Rejected
from headrace.trainer.loading.fetch import PartFetcher

MIB = 1 << 20
NEVER_S = 3600.0  # a hedge that no test lives to see
SOON_S = 0.05
ONCE_S = 1.0  # time enough for what follows a first hedge, before the second one


@pytest.fixture
def make_fetcher() -> Iterator[Callable[..., PartFetcher]]:
    """(report_lost, **options) -> a fetcher, closed at the end."""
    with ExitStack() as stack:

        def make(report_lost: Callable[[str, str], None] = lambda ticket, lease: None, **options: Any) -> PartFetcher:
            fetcher = PartFetcher(report_lost, **{"max_parts": 8, "max_bytes": 64 * MIB, "threads": 4} | options)
            stack.callback(fetcher.close)
            return fetcher

        yield make


def wait_for(condition: Callable[[], Any]) -> None:
    """What another thread or a preprocessor does is asked for, again and again."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def sample_id(part: Any) -> int:
    (number,) = [number for batch in part.batches for number in batch.column("sample_id").to_pylist()]
    return int(number)


def is_asked(producer: Any, ticket: str) -> bool:
    return bool(producer.num_waiting(ticket))


def held(producer: Any, *tickets: str) -> int:
    """How many of the parts a trainer holds in the arena."""
    return sum(producer.is_held(ticket) for ticket in tickets)


def wake(producer: Any, batches: dict[str, Any]) -> None:
    """What hung is decoded after all."""
    for ticket, batch in batches.items():
        producer.finish(ticket, batch)


# -- a preprocessor that hangs ----------------------------------------------------------------------------------------


def test_a_part_that_is_told_elsewhere_is_asked_for_there_at_once_and_released_when_it_comes_twice(
    make_producer, make_part, make_fetcher
):
    hung, other = make_producer(), make_producer()
    batch = make_part(MIB, 7)
    hung.add_stuck("part")
    other.add("part", batch)
    fetcher = make_fetcher(hedge_s=NEVER_S)
    fetcher.set_location("part", "first", hung.endpoint)
    fetcher.queue(["part"])
    wait_for(lambda: is_asked(hung, "part"))
    fetcher.set_location("part", "second", other.endpoint)
    assert sample_id(fetcher.take("part")) == 7
    wake(hung, {"part": batch})
    wait_for(lambda: fetcher.statistics().num_late)
    assert (held(hung, "part"), held(other, "part")) == (0, 1), "the second delivery is nobody's"
    fetcher.release(["part"])
    assert held(other, "part") == 0
    statistics = fetcher.statistics()
    assert (statistics.num_parts, statistics.num_hedged, statistics.num_fetched_again) == ({"shared_memory": 2}, 0, 1)
    assert (statistics.num_pending, statistics.ready_bytes, statistics.held_bytes) == (0, 0, 0)
    assert statistics.received_bytes > 2 * MIB


def test_a_copy_with_samples_that_other_ranks_lack_is_not_taken(make_producer, make_part, make_fetcher):
    hung, other = make_producer(), make_producer()
    for producer in (hung, other):
        producer.add_stuck("part")
    fetcher = make_fetcher(hedge_s=NEVER_S)
    fetcher.set_location("part", "first", hung.endpoint)
    fetcher.queue(["part"])
    wait_for(lambda: is_asked(hung, "part"))
    fetcher.set_location("part", "second", other.endpoint, left_out=[8])
    hung.finish("part", make_part(1000, 8))
    wait_for(lambda: not is_asked(hung, "part"))
    wait_for(lambda: not held(hung, "part"))
    assert not fetcher.have_arrived(["part"])
    left_out = Rejected(name="s/8", reason=Reason.UNSUPPORTED_MEDIA, detail="no codec", sample_id=8)
    other.finish("part", make_part(1000, 7), (left_out,))
    part = fetcher.take("part")
    assert (sample_id(part), part.rejected) == (7, (left_out,))


@pytest.mark.parametrize("transport", ["shared_memory", "flight"])
def test_all_parts_of_a_preprocessor_that_hangs_move_as_they_are_awaited(make_producer, make_part, make_fetcher, transport):
    """More of them than there are threads, and all within one deadline: a second one would never end."""
    hung, other = make_producer(), make_producer()
    batches = {f"part-{number}": make_part(1000, number) for number in range(10)}
    reports = []

    def move(ticket: str, lease: str) -> None:
        reports.append((ticket, lease))
        other.add(ticket, batches[ticket])
        fetcher.set_location(ticket, "second", other.endpoint)

    fetcher = make_fetcher(move, hedge_s=ONCE_S, threads=2, transports=("flight", transport))
    for ticket in batches:
        hung.add_stuck(ticket)
        fetcher.set_location(ticket, "first", hung.endpoint)
    fetcher.queue(batches)
    for number, ticket in enumerate(batches):
        assert sample_id(fetcher.take(ticket)) == number
        fetcher._hedging._hedge_s = NEVER_S
        assert fetcher.statistics().num_pending <= 2 + 1 + 1, "the threads that one preprocessor can hold up, and the other's"
    assert reports == [(ticket, "first") for ticket in batches], "each once, in the order in which they were waited for"
    assert fetcher.statistics().num_hedged == len(batches)
    wake(hung, batches)
    wait_for(lambda: not fetcher.statistics().num_pending)
    fetcher.release(batches)
    assert (held(hung, *batches), held(other, *batches)) == (0, 0)


def test_only_the_part_that_is_waited_for_is_asked_of_another_and_once_a_deadline(make_producer, make_part, make_fetcher):
    hung = make_producer()
    reported = threading.Event()
    reports = []

    def report(ticket: str, lease: str) -> None:
        fetcher._hedging._hedge_s = NEVER_S
        reports.append(ticket)
        reported.set()

    fetcher = make_fetcher(report, hedge_s=ONCE_S)
    batches = {ticket: make_part(1000, number) for number, ticket in enumerate(["first", "second"])}
    for ticket in batches:
        hung.add_stuck(ticket)
        fetcher.set_location(ticket, f"lease of {ticket}", hung.endpoint)
    fetcher.queue(batches)
    wait_for(lambda: is_asked(hung, "second"))
    taking = threading.Thread(target=fetcher.take, args=("first",))
    taking.start()
    assert reported.wait(10)
    wake(hung, batches)  # the former place delivers first: that counts as well
    taking.join(10)
    assert sample_id(fetcher.take("second")) == 1
    assert reports == ["first"]
    assert fetcher.statistics().num_late == 0


def test_a_preprocessor_that_hangs_holds_up_no_other(make_producer, make_part, make_fetcher):
    hung, other = make_producer(), make_producer()
    fetcher = make_fetcher(hedge_s=NEVER_S, threads=1)
    tickets = [f"{where}-{number}" for number in range(4) for where in ("hung", "other")]
    for number, ticket in enumerate(tickets):
        if ticket.startswith("hung"):
            hung.add_stuck(ticket)
            fetcher.set_location(ticket, "lease", hung.endpoint)
        else:
            other.add(ticket, make_part(1000, number))
            fetcher.set_location(ticket, "lease", other.endpoint)
    fetcher.queue(tickets)
    assert [sample_id(fetcher.take(ticket)) for ticket in tickets[1::2]] == [1, 3, 5, 7]
    assert fetcher.statistics().num_pending == 1


def test_the_part_that_is_waited_for_is_asked_for_though_others_keep_its_preprocessor_busy(
    make_producer, make_part, make_fetcher
):
    producer = make_producer()
    producer.add_stuck("second")
    producer.add("first", make_part(1000, 7))
    fetcher = make_fetcher(hedge_s=NEVER_S, threads=1)
    fetcher.queue(["first", "second"])
    fetcher.set_location("second", "lease", producer.endpoint)
    wait_for(lambda: is_asked(producer, "second"))
    fetcher.set_location("first", "lease", producer.endpoint)
    assert sample_id(fetcher.take("first")) == 7


def test_a_part_that_is_placed_where_it_is_asked_for_already_is_not_asked_for_twice(make_producer, make_part, make_fetcher):
    """As where there is one preprocessor: what is decoded there serves the newer lease too."""
    hung = make_producer()
    fetcher = make_fetcher(lambda ticket, lease: fetcher.set_location(ticket, lease + "+", hung.endpoint), hedge_s=SOON_S)
    hung.add_stuck("part")
    fetcher.set_location("part", "lease", hung.endpoint)
    fetcher.queue(["part"])
    taking = threading.Thread(target=fetcher.take, args=("part",))
    taking.start()
    wait_for(lambda: fetcher.statistics().num_hedged >= 2)
    assert fetcher.statistics().num_pending == 1
    wake(hung, {"part": make_part(1000, 7)})
    taking.join(10)
    assert not taking.is_alive()
    assert fetcher.statistics().num_fetched_again == 0


def test_a_part_whose_place_is_told_before_its_order_has_arrived_there_is_not_lost(
    make_producer, make_part, make_fetcher, monkeypatch, caplog
):
    monkeypatch.setattr("headrace.trainer.loading.fetch._ORDER_S", 60.0)
    reports = []
    producer = make_producer()
    fetcher = make_fetcher(lambda ticket, lease: reports.append(ticket))
    with caplog.at_level(logging.DEBUG, "headrace.trainer.loading.fetch"):
        fetcher.set_location("part", "lease", producer.endpoint)
        fetcher.queue(["part"])
        wait_for(lambda: "not there yet" in caplog.text)
    producer.add("part", make_part(1000, 7))
    assert sample_id(fetcher.take("part")) == 7
    assert reports == []
    assert fetcher.statistics().num_fetched_again == 0


def test_a_rank_that_was_taken_over_is_told_when_it_reports(make_producer, make_fetcher):
    def report(ticket: str, lease: str) -> None:
        raise SupersededError("a newer session took over")

    hung = make_producer()
    hung.add_stuck("part")
    fetcher = make_fetcher(report, hedge_s=SOON_S)
    fetcher.set_location("part", "lease", hung.endpoint)
    fetcher.queue(["part"])
    with pytest.raises(SupersededError):
        fetcher.take("part")


def test_closing_ends_the_wait_for_parts_that_no_thread_was_left_for(make_producer, make_fetcher, monkeypatch):
    monkeypatch.setattr("headrace.trainer.loading.fetch._MAX_THREADS", 1)
    hung = make_producer()
    fetcher = make_fetcher(hedge_s=NEVER_S)
    for ticket in ("first", "second"):
        hung.add_stuck(ticket)
        fetcher.set_location(ticket, "lease", hung.endpoint)
    fetcher.queue(["first", "second"])
    wait_for(lambda: is_asked(hung, "first"))
    fetcher.close()
    with pytest.raises(UnavailableError, match="is closed"):
        fetcher.take("second")


def test_closing_ends_every_wait_whatever_hangs(make_producer, make_fetcher):
    hung = make_producer()
    hung.add_stuck("part")
    fetcher = make_fetcher(hedge_s=SOON_S)
    fetcher.set_location("part", "lease", hung.endpoint)
    fetcher.queue(["part", "nowhere"])
    errors: list[BaseException] = []

    def take(ticket: str) -> None:
        try:
            fetcher.take(ticket)
        except UnavailableError as err:
            errors.append(err)

    takers = [threading.Thread(target=take, args=(ticket,)) for ticket in ("part", "nowhere")]
    for taker in takers:
        taker.start()
    wait_for(lambda: fetcher.statistics().num_hedged)
    fetcher.close()
    for taker in takers:
        taker.join(10)
    assert [str(err) for err in errors] == 2 * ["the loader is closed"]
    wait_for(lambda: not fetcher.statistics().num_pending)


# -- a consumer that hangs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shared_memory", "flight"])
def test_a_trainer_that_stops_reading_keeps_memory_flat_on_both_sides(make_producer, make_part, make_fetcher, transport):
    """And when it goes on, every part comes, once and in order."""
    num_parts, part_bytes, ahead_bytes, budget_bytes, threads = 40, MIB // 2, 2 * MIB, 4 * MIB, 2
    producer = make_producer(budget_bytes)
    fetcher = make_fetcher(max_parts=99, max_bytes=ahead_bytes, threads=threads, transports=("flight", transport))
    tickets = [f"part-{number}" for number in range(num_parts)]
    for number, ticket in enumerate(tickets):
        producer.add(ticket, make_part(part_bytes, number), step=number)
        fetcher.set_location(ticket, "lease", producer.endpoint)
    fetcher.queue(tickets)
    wait_for(lambda: fetcher.statistics().ready_bytes >= ahead_bytes and not fetcher.statistics().num_pending)
    wait_for(lambda: producer.store.held_bytes + 1.5 * part_bytes > budget_bytes)  # it decodes ahead until it is full
    assert fetcher.statistics().ready_bytes <= ahead_bytes + threads * 1.1 * part_bytes
    assert producer.store.held_bytes <= budget_bytes
    assert producer.num_decoded < num_parts / 2

    for number, ticket in enumerate(tickets):
        assert sample_id(fetcher.take(ticket)) == number
        fetcher.release([ticket])
        producer.commit(number)
        assert fetcher.statistics().ready_bytes <= ahead_bytes + threads * 1.1 * part_bytes
    assert producer.arena.statistics().high_water_bytes <= budget_bytes * 1.1
    assert fetcher.statistics().num_parts.keys() >= {transport}
