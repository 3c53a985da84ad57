"""Which commits wait for the other ranks, and which would wait for their own thread."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest

from headrace.trainer.loading.consumers import Consumers


class Loader:
    """Only told from others."""


@pytest.fixture
def consumers() -> Consumers:
    return Consumers()


def loaders(consumers: Consumers, count: int = 2, *, endpoint: str = "a:1", job: str = "job") -> list[Loader]:
    """One a rank, made by this thread."""
    made = [Loader() for _ in range(count)]
    for rank, loader in enumerate(made):
        consumers.enter(loader, endpoint, job, rank)
    return made


def elsewhere(ask: Callable[[], bool | None]) -> bool | None:
    """What another thread is answered."""
    answers: list[bool | None] = []
    thread = threading.Thread(target=lambda: answers.append(ask()))
    thread.start()
    thread.join()
    return answers[0]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_last_commit_of_a_step_waits(consumers: Consumers, count: int) -> None:
    ranks = loaders(consumers, count)
    for step in range(3):
        assert [consumers.commit(loader, step) for loader in ranks] == [False] * (count - 1) + [True]


def test_several_steps_of_a_rank_may_be_committed_before_those_of_another(consumers: Consumers) -> None:
    first, second = loaders(consumers)
    assert [consumers.commit(loader, step) for loader in (first, second) for step in (0, 1)] == [False, False, True, True]


def test_ranks_of_threads_of_their_own_all_wait(consumers: Consumers) -> None:
    """Though one thread has made them all."""
    first, second = loaders(consumers)
    for loader in (first, second):
        elsewhere(lambda loader=loader: consumers.take(loader))
    consumers.take(first)
    assert consumers.commit(first, 0)
    assert elsewhere(lambda: consumers.commit(second, 0))
    assert consumers.commit(first, 1)


def test_who_commits_matters_and_not_who_takes_the_steps(consumers: Consumers) -> None:
    ranks = loaders(consumers)
    for step in range(2):
        for loader in ranks:
            elsewhere(lambda loader=loader: consumers.take(loader))
        assert [consumers.commit(loader, step) for loader in ranks] == [False, True]


def test_other_jobs_and_other_services_do_not_matter(consumers: Consumers) -> None:
    (only,) = loaders(consumers, 1)
    others = loaders(consumers, job="other"), loaders(consumers, endpoint="b:1")
    assert consumers.commit(only, 0)
    assert not consumers.commit(others[0][0], 0)


def test_loaders_that_are_over_do_not_matter(consumers: Consumers) -> None:
    first, former = loaders(consumers)
    consumers.leave(former)
    assert consumers.commit(first, 0)
    assert consumers.commit(former, 0), "it has left, and is told so by the service"
    again = loaders(consumers, 1)
    assert consumers.commit(again[0], 5), "the former loader of the same rank was not closed"
    lost = loaders(consumers)
    del lost
    gc.collect()
    assert consumers.commit(again[0], 6)
