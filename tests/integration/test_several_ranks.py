"""One process with the loaders of several ranks: no commit waits for its own thread, and the last one of a step is durable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from headrace import trainer

pytestmark = pytest.mark.integration


@contextmanager
def ranks(cluster: Any, job: str, *which: int, num_ranks: int = 2) -> Iterator[list[trainer.StepLoader]]:
    """Loaders of these."""
    with ExitStack() as stack:
        yield [stack.enter_context(trainer.connect(cluster.endpoint, job=job, rank=r, num_ranks=num_ranks)) for r in which]


def read(steps: Iterator[trainer.Step]) -> trainer.Step:
    list(step := next(steps))
    return step


def within_a_minute(do: Callable[[], Any]) -> Any:
    """What a thread of its own brings, which may hang."""
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(do()), daemon=True)
    thread.start()
    thread.join(60)
    assert done, "it hangs or has failed"
    return done[0]


def test_a_step_is_in_the_ledger_when_the_last_rank_of_a_thread_has_committed_it(calm: Any, spec: Any) -> None:
    job = calm.submit(spec("ranks-of-a-thread", steps=4))

    def train() -> list[int]:
        durable = []
        with ranks(calm, job, 0, 1) as both:
            for steps in zip(*both, strict=True):
                for loader, step in zip(both, steps, strict=True):
                    list(step)
                    loader.commit(step)
                durable.append(len(calm.ledger(job)))
        return durable

    assert within_a_minute(train) == [1, 2, 3, 4]


def test_two_threads_of_two_ranks_each_wait_for_one_another(calm: Any, spec: Any) -> None:
    """As two processes do."""
    job = calm.submit(spec("two-threads", steps=3, topology={"replicas": 4, "microbatches": 1}))

    def train(*which: int) -> list[bool]:
        durable = []
        with ranks(calm, job, *which, num_ranks=4) as mine:
            for steps in zip(*mine, strict=True):
                for loader, step in zip(mine, steps, strict=True):
                    list(step)
                    loader.commit(step)
                durable.append(len(calm.ledger(job)) > steps[0].index)
        return durable

    with ThreadPoolExecutor(2) as pool:
        others = pool.submit(train, 2, 3)
        assert within_a_minute(lambda: train(0, 1)) == [True] * 3
        assert others.result(60) == [True] * 3


def test_steps_may_be_taken_by_other_threads_than_the_one_that_commits(calm: Any, spec: Any) -> None:
    job = calm.submit(spec("handed-over", steps=3))

    def train() -> list[int]:
        durable = []
        with ranks(calm, job, 0, 1) as both, ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
            streams = [iter(loader) for loader in both]
            for _ in range(3):
                taken = [pool.submit(read, steps) for pool, steps in zip((first, second), streams, strict=True)]
                for loader, step in zip(both, taken, strict=True):
                    loader.commit(step.result())
                durable.append(len(calm.ledger(job)))
        return durable

    assert within_a_minute(train) == [1, 2, 3]


def test_states_ahead_of_the_store_are_caught_up_with_by_one_thread(calm: Any, spec: Any) -> None:
    """The first rank commits again before the second one is open."""
    job = calm.submit(spec("both-ahead", steps=4))

    def train() -> list[int]:
        loaders = [trainer.connect(calm.endpoint, job=job, rank=rank, num_ranks=2) for rank in range(2)]
        for loader in loaders:
            loader.load_state_dict(loader.state_dict() | {"step": 1})
        indices = []
        for steps in zip(*loaders, strict=True):
            for loader, step in zip(loaders, steps, strict=True):
                list(step)
                loader.commit(step)
            indices.append(steps[0].index)
        for loader in loaders:
            loader.close()
        return indices

    assert within_a_minute(train) == [1, 2, 3]
    assert len(calm.ledger(job)) == 4


def test_loaders_that_nobody_closed_do_not_matter_once_their_job_is_done(calm: Any, spec: Any) -> None:
    job = calm.submit(spec("unclosed", steps=2))

    def train() -> tuple[list[trainer.StepLoader], list[bool]]:
        unclosed = [trainer.connect(calm.endpoint, job=job, rank=rank, num_ranks=2) for rank in range(2)]
        for steps in zip(*unclosed, strict=True):
            for loader, step in zip(unclosed, steps, strict=True):
                list(step)
                loader.commit(step)
        with calm.client() as client:
            client.reset(job, 0)
        durable = []
        other = threading.Thread(target=calm.consume, args=(job,), kwargs={"rank": 1, "num_ranks": 2})
        with ranks(calm, job, 0) as (mine,):
            other.start()
            for step in mine:
                list(step)
                mine.commit(step)
                durable.append(len(calm.ledger(job)) > step.index)
        other.join(60)
        return unclosed, durable

    unclosed, durable = within_a_minute(train)
    assert durable == [True, True]
    for loader in unclosed:
        loader.close()
