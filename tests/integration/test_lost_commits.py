"""A store that has lost its last commits: trainers are told, and can go on."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis
import torch

from headrace import rpc, trainer
from headrace.cli.example import example_data
from headrace.errors import ConflictError, NotFoundError
from headrace.ledger import ledger_sha256
from headrace.trainer.pipeline.cargo import Cargo
from headrace.trainer.pipeline.chunk import Inputs
from headrace.trainer.pipeline.feed import PipelineLoader
from headrace.trainer.pipeline.topology import PipelineTopology
from tests.integration.consuming import consume

pytestmark = pytest.mark.integration


def lose_commits(cluster: Any, store: Any, job: str, step: int) -> None:
    """End the service and lose the commits from `step` on, as a machine does that loses what was not on its disk."""
    cluster.reorder.terminate()
    cluster.reorder.wait(5.0)
    with redis.Redis(port=store.port) as client:
        client.ltrim(f"headrace:{{{job}}}:ledger", 0, step - 1)
        client.hset(f"headrace:{{{job}}}:job", "cursor", step)


def content_of_step(cluster: Any, job: str, index: int) -> int:
    """As a checkpoint of the step behind it has it."""
    with trainer.connect(cluster.endpoint, job=job) as loader:
        return next(step.content for step in loader if step.index == index)


@pytest.mark.slow
def test_trainers_commit_again_what_the_store_has_lost(cluster: Any, store: Any, spec: Any, undisturbed: Any) -> None:
    cluster.start_reorder(store=store.url)
    cluster.add_preprocessors(1)
    job = cluster.submit(spec("set-back", steps=8))
    with trainer.connect(cluster.endpoint, job=job) as loader:
        consume(loader, 5)
        state = loader.state_dict()
    lose_commits(cluster, store, job, 2)
    cluster.start_reorder(listen=cluster.endpoint, store=store.url)

    loader = trainer.connect(cluster.endpoint, job=job)
    loader.load_state_dict(state)
    with loader:
        assert loader.next_step == 5
        assert loader.state_dict()["step"] == 5
        assert consume(loader) == [5, 6, 7]
    assert ledger_sha256(cluster.ledger(job)) == undisturbed(8)


@pytest.mark.slow
def test_ranks_go_on_in_their_sessions_where_the_store_is_put_back_under_the_leader(
    cluster: Any, store: Any, spec: Any, undisturbed: Any, tmp_path: Path
) -> None:
    cluster.start_reorders(store.url)
    cluster.add_preprocessors(1)
    job = cluster.submit(spec("under-the-feet", steps=8))
    done: dict[int, list[int]] = {}

    def train(rank: int) -> None:
        with trainer.connect(cluster.endpoint, job=job, rank=rank, num_ranks=2) as loader:
            done[rank] = []
            for step in loader:
                list(step)
                if (rank, step.index) == (0, 2):
                    store.keep(tmp_path / "some commits ago")
                if (rank, step.index) == (0, 5):
                    store.put_back(tmp_path / "some commits ago")
                loader.commit(step)
                done[rank].append(step.index)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, range(2)))
    assert done == {0: list(range(8)), 1: list(range(8))}
    assert ledger_sha256(cluster.ledger(job)) == undisturbed(8)


@pytest.mark.slow
def test_a_job_of_a_store_that_was_emptied_is_submitted_again_and_goes_on_from_checkpoints(
    cluster: Any, store: Any, spec: Any, undisturbed: Any
) -> None:
    """What was trained is committed again, without being trained."""
    services = [service.endpoint() for service in cluster.start_reorders(store.url)]
    cluster.add_preprocessors(1)
    job = cluster.submit(spec("emptied", steps=8))
    with trainer.connect(cluster.endpoint, job=job) as loader:
        consume(loader, 4)
        state = loader.state_dict()
        with redis.Redis(port=store.port) as client:
            client.flushall()
        with pytest.raises(NotFoundError, match=r"no job 'emptied' here; there are: none; .*if the store has lost it, submit it"):
            consume(loader)
    deadline = time.monotonic() + 60
    while sum(rpc.is_serving(service, rpc.JOBS) for service in services) != 1:  # the former leader lets go within 0.3 s
        assert time.monotonic() < deadline
        time.sleep(0.02)  # polls real services
    assert cluster.submit(spec("emptied", steps=8)) == job
    loader = trainer.connect(cluster.endpoint, job=job)
    loader.load_state_dict(state)
    with loader:
        assert consume(loader) == [4, 5, 6, 7]
    assert ledger_sha256(cluster.ledger(job)) == undisturbed(8)


@pytest.mark.slow
def test_a_trainer_whose_service_comes_back_with_a_store_that_lost_commits_is_told(cluster: Any, store: Any, spec: Any) -> None:
    cluster.start_reorder(store=store.url)
    cluster.add_preprocessors(1)
    job = cluster.submit(spec("came-back", steps=8))
    with trainer.connect(cluster.endpoint, job=job) as loader:
        consume(loader, 3)
        lose_commits(cluster, store, job, 1)
        cluster.start_reorder(listen=cluster.endpoint, store=store.url)
        with pytest.raises(ConflictError, match="committed 3 steps of job 'came-back', whose store has lost all but 1 of them"):
            consume(loader)


def test_a_checkpoint_one_step_ahead_of_the_store_is_good_where_all_ranks_bring_it(
    calm: Any, spec: Any, undisturbed: Any
) -> None:
    job = calm.submit(spec("one-ahead", steps=8))
    done: dict[int, list[int]] = {}

    def train(rank: int) -> None:
        loader = trainer.connect(calm.endpoint, job=job, rank=rank, num_ranks=2)
        loader.load_state_dict(loader.state_dict() | {"step": 1})
        with loader:
            done[rank] = consume(loader)

    ranks = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(60)
    assert done == {0: list(range(1, 8)), 1: list(range(1, 8))}
    assert ledger_sha256(calm.ledger(job)) == undisturbed(8)


@pytest.mark.slow
def test_ranks_whose_checkpoints_are_of_different_steps_are_told_the_common_one(calm: Any, spec: Any) -> None:
    job = calm.submit(spec("apart", steps=8))
    first, second = (trainer.connect(calm.endpoint, job=job, rank=rank, num_ranks=2) for rank in range(2))
    first.load_state_dict(first.state_dict() | {"step": 1})
    second.load_state_dict(second.state_dict() | {"step": 0})
    with first:
        with pytest.raises(ConflictError, match="rank 1 goes on from step 0, and rank 0 from step 1: load that of step 0"):
            second.open()
        second.close()


@pytest.mark.slow
def test_ranks_that_keep_two_checkpoints_go_on_from_the_newest_that_both_have(calm: Any, spec: Any, undisturbed: Any) -> None:
    """Of two ranks one was lost between a commit and its checkpoint."""
    job = calm.submit(spec("a-step-apart", steps=8))
    saved: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    done: dict[int, list[int]] = {0: [], 1: []}

    def train(rank: int) -> None:
        with trainer.connect(calm.endpoint, job=job, rank=rank, num_ranks=2) as loader:
            for step in loader:
                list(step)
                loader.commit(step)
                if (rank, step.index) != (1, 4):
                    saved[rank] = [*saved[rank][-1:], loader.state_dict()]
                if step.index == 4:
                    return

    def go_on(rank: int) -> None:
        loader = trainer.connect(calm.endpoint, job=job, rank=rank, num_ranks=2)
        assert loader.load_newest_common(saved[rank])["step"] == 4
        with loader:
            done[rank] = consume(loader)

    for run in (train, go_on):
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(run, range(2)))
    assert [[state["step"] for state in saved[rank]] for rank in range(2)] == [[4, 5], [3, 4]]
    assert done == {0: [4, 5, 6, 7], 1: [4, 5, 6, 7]}
    assert ledger_sha256(calm.ledger(job)) == undisturbed(8)


@pytest.mark.slow
def test_a_state_of_weights_that_the_store_has_lost_is_refused(cluster: Any, store: Any, spec: Any) -> None:
    """The samples that the model has trained would not be those of the ledger."""
    cluster.start_reorder(store=store.url)
    cluster.add_preprocessors(1)
    sources = [{"path": str(example_data()), "name": name, "weight": 1} for name in ("a", "b")]
    job = cluster.submit(spec("weights", steps=12, window=1, sources=sources))
    with trainer.connect(cluster.endpoint, job=job) as loader, cluster.client() as client:
        steps = iter(loader)
        for _ in range(6):
            list(step := next(steps))
            if step.index == 1:
                client.set_weights(job, 4, {"a": 3, "b": 1})
            loader.commit(step)
        state = loader.state_dict()
    lose_commits(cluster, store, job, 2)
    with redis.Redis(port=store.port) as client:
        client.hset(f"headrace:{{{job}}}:job", "mixture", "[]")
        client.delete(f"headrace:{{{job}}}:window")
    cluster.start_reorder(listen=cluster.endpoint, store=store.url)
    loader = trainer.connect(cluster.endpoint, job=job)
    loader.load_state_dict(state)
    with pytest.raises(ConflictError, match=r"has trained other samples in step 5 than job 'weights' has .* of step 2 or of an"):
        loader.open()
    loader.close()
    assert len(cluster.ledger(job)) == 2


def test_a_pipeline_that_catches_up_keeps_no_routes_of_the_steps_between(calm: Any, spec: Any) -> None:
    units: dict[str, Any] = {"encoder": {}, "llm": {"dp": 2}}
    topology = PipelineTopology.model_validate({"units": units})
    job = calm.submit(spec("ahead-in-stages", steps=8))
    first: list[int] = []
    kept: list[set[int]] = []
    content = content_of_step(calm, job, 2)

    def train(rank: int) -> None:
        place = topology.place(rank)
        loader = PipelineLoader(calm.endpoint, job=job, topology=topology, place=place, device=torch.device("cpu"))
        loader.load_state_dict(loader.state_dict() | {"step": 3, "content": content})
        with loader:
            step, _ = next(loader.steps(lambda *_: Cargo(inputs=[Inputs(num_rows=0)])))
            first.append(step.index)
            kept.append({step for step in loader._needed if step <= 3})

    ranks = [threading.Thread(target=train, args=(rank,)) for rank in range(topology.world_size)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(60)
    assert first == [3] * topology.world_size
    assert kept == [set()] * topology.world_size
