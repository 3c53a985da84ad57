"""Several jobs share the fleet by weight, whatever their steps are called."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reorder_service.fleet.fair_queue import FairQueue


@dataclass
class Item:
    job: str
    priority: tuple[int, ...] = (0,)
    share: float = 1.0
    num_samples: int = 1


def serve(queue: FairQueue[Item], count: int) -> list[Item]:
    """The next so many, as the fleet takes them."""
    served = []
    while len(served) < count and (item := queue.first()) is not None:
        queue.served(item)
        queue.pop(item)
        served.append(item)
    return served


def full(
    queue: FairQueue[Item], job: str, count: int = 100, *, share: float = 1.0, first_step: int = 0, samples: int = 1
) -> None:
    for step in range(first_step, first_step + count):
        queue.push(Item(job, (step,), share, samples))


def test_inside_of_a_job_the_lowest_priority_goes_first_and_then_who_came_first() -> None:
    queue: FairQueue[Item] = FairQueue()
    items = [Item("a", (2,)), Item("a", (1,)), Item("a", (1,))]
    for item in items:
        queue.push(item)
    assert serve(queue, 9) == [items[1], items[2], items[0]]
    assert queue.first() is None


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5)), max_size=30), st.data())
def test_the_first_few_are_those_that_come_first_where_no_other_job_waits(
    items: list[tuple[str, int]], data: st.DataObject
) -> None:
    queue: FairQueue[Item] = FairQueue()
    waiting = [Item(job, (priority,)) for job, priority in items]
    for item in waiting:
        queue.push(item)
    gone = data.draw(st.lists(st.sampled_from(waiting), unique_by=id)) if waiting else []
    for item in gone:
        queue.pop(item)
    few = queue.first_few(4)
    assert few[:1] == [item for item in [queue.first()] if item is not None]
    left = [item for item in waiting if few and item.job == few[0].job and not any(item is other for other in gone)]
    assert [id(item) for item in few] == [id(item) for item in sorted(left, key=lambda item: item.priority)[:4]]


def test_a_job_far_along_is_not_held_up_by_one_that_begins() -> None:
    queue: FairQueue[Item] = FairQueue()
    full(queue, "old", first_step=100_000)
    full(queue, "new")
    assert Counter(item.job for item in serve(queue, 20)) == {"old": 10, "new": 10}


@given(st.floats(0.1, 10), st.integers(1, 9))
def test_shares_are_of_samples(share: float, samples: int) -> None:
    queue: FairQueue[Item] = FairQueue()
    full(queue, "a", 1000, share=share, samples=samples)
    full(queue, "b", 1000)
    had: Counter[str] = Counter()
    for item in serve(queue, 200):
        had[item.job] += item.num_samples
    assert abs(had["a"] / share - had["b"]) <= samples / share + 1


def test_a_job_that_was_idle_is_not_owed_anything() -> None:
    queue: FairQueue[Item] = FairQueue()
    full(queue, "idle", 1)
    serve(queue, 1)
    full(queue, "busy", 500)
    serve(queue, 300)
    full(queue, "idle", 100)
    assert Counter(item.job for item in serve(queue, 20))["idle"] <= 11


def test_what_goes_past_the_queue_counts_too() -> None:
    queue: FairQueue[Item] = FairQueue()
    full(queue, "a")
    full(queue, "b")
    for _ in range(10):
        queue.served(Item("a"))
    assert {item.job for item in serve(queue, 10)} == {"b"}


def test_items_go_from_anywhere_and_so_does_a_job() -> None:
    queue: FairQueue[Item] = FairQueue()
    full(queue, "a", 4)
    full(queue, "b", 2)
    first, second, third, last = [item for item in queue if item.job == "a"]
    assert [queue.pop(item) for item in (second, first, third, third)] == [True, True, True, False]
    assert [item for item in queue if item.job == "a"] == [last]
    queue.push(second)
    assert [item for item in serve(queue, 9) if item.job == "a"] == [second, last]
    full(queue, "a", 4)
    full(queue, "b", 2)
    queue.forget("a")
    assert {item.job for item in queue} == {"b"}
    assert len(queue) == 2


@pytest.mark.parametrize("jobs", [1, 5])
def test_every_item_is_served_once(jobs: int) -> None:
    queue: FairQueue[Item] = FairQueue()
    for job in range(jobs):
        full(queue, str(job), 20, share=1.0 + job)
    served = serve(queue, 1000)
    assert len(served) == len({id(item) for item in served}) == 20 * jobs
