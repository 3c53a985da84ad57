"""Answers of the store that are lost on the way, and copies of its commands that arrive when they are long done."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headrace import trainer
from headrace.ledger import ledger_sha256
from tests.integration.consuming import consume
from tests.store_proxy import StoreProxy

pytestmark = pytest.mark.integration

STEPS = 10


@pytest.fixture
def proxy(store: Any) -> Iterator[StoreProxy]:
    made = StoreProxy(store.port)
    yield made
    made.close()


@pytest.mark.slow
def test_a_reset_whose_answer_is_lost_and_whose_copy_comes_late_is_done_once(
    cluster: Any, proxy: StoreProxy, spec: Any, undisturbed: Any
) -> None:
    cluster.start_reorder(store=proxy.url)
    cluster.add_preprocessors(1)
    job = cluster.submit(spec("late-reset", steps=STEPS))
    with trainer.connect(cluster.endpoint, job=job) as loader:
        consume(loader, 5)
    with cluster.client() as client:
        proxy.lose_answer_to(b'["HINCRBY"')
        status = client.reset(job, 2)
        assert proxy.caught.is_set()
        assert (status.committed_steps, status.generation) == (2, 2)
        with trainer.connect(cluster.endpoint, job=job) as loader:
            assert consume(loader, 7) == list(range(2, 7))
            proxy.deliver_copy()
            assert consume(loader) == list(range(7, STEPS))
        assert client.show(job).generation == 2
    assert ledger_sha256(cluster.ledger(job)) == undisturbed(STEPS)


@pytest.mark.slow
def test_a_commit_whose_answer_is_lost_and_whose_copy_comes_behind_a_reset_commits_nothing(
    cluster: Any, proxy: StoreProxy, spec: Any, undisturbed: Any
) -> None:
    """The model that goes back has not trained the step."""
    cluster.start_reorder(store=proxy.url)
    cluster.add_preprocessors(1)
    job = cluster.submit(spec("late-commit", steps=STEPS))
    with trainer.connect(cluster.endpoint, job=job) as loader:
        consume(loader, 2)
        proxy.lose_answer_to(b'["RPUSH"')
        consume(loader, 4)
    assert proxy.caught.is_set()
    with cluster.client() as client:
        client.reset(job, 2)
        proxy.deliver_copy()
        assert len(cluster.ledger(job)) == client.show(job).committed_steps == 2
    assert cluster.consume(job) == list(range(2, STEPS))
    assert ledger_sha256(cluster.ledger(job)) == undisturbed(STEPS)
