"""Ranks that load a checkpoint's state a moment after they have opened their sessions, at another moment than their peers."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from headrace import trainer
from headrace.errors import SupersededError
from headrace.jobs_client import JobsClient
from headrace.ledger import ledger_sha256
from headrace.trainer.pipeline.feed import PipelineLoader
from headrace.trainer.pipeline.places_loader import PlacesLoader
from headrace.trainer.pipeline.topology import PipelineTopology
from tests.integration.consuming import consume

pytestmark = pytest.mark.integration


def at_step(loader: Any, step: int) -> dict[str, Any]:
    """As a checkpoint has it that does not say which samples it has trained."""
    state: dict[str, Any] = loader.state_dict() | {"step": step, "content": 0}
    return state


def test_ranks_load_an_older_state_when_all_have_opened_their_sessions(calm: Any, spec: Any, undisturbed: Any) -> None:
    job = calm.submit(spec("load-inside", steps=8))
    with trainer.connect(calm.endpoint, job=job) as loader:
        consume(loader, 3)
    all_open = threading.Barrier(2)

    def train(rank: int) -> list[int]:
        with trainer.connect(calm.endpoint, job=job, rank=rank, num_ranks=2) as loader:
            assert loader.next_step == 3
            all_open.wait(60)
            if rank == 1:
                time.sleep(0.5)  # rank 0 asks meanwhile, and is told to wait
            loader.load_state_dict(at_step(loader, 2))
            return consume(loader)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(train, range(2))) == [list(range(2, 8))] * 2
    assert ledger_sha256(calm.ledger(job)) == undisturbed(8)


def test_a_rank_whose_session_has_ended_since_another_set_the_job_back_loads_its_state(
    calm: Any, spec: Any, undisturbed: Any
) -> None:
    job = calm.submit(spec("ended-since", steps=8))
    with trainer.connect(calm.endpoint, job=job) as loader:
        consume(loader, 3)
    with trainer.connect(calm.endpoint, job=job) as loader:
        with JobsClient(calm.endpoint) as client:
            client.reset(job, 2)
        while not isinstance(loader._error, SupersededError):  # it was told, and nobody has asked it since
            time.sleep(0.05)
        loader.load_state_dict(at_step(loader, 2))
        assert consume(loader) == list(range(2, 8))
    assert ledger_sha256(calm.ledger(job)) == undisturbed(8)


def test_the_places_of_a_pipeline_open_no_session_before_they_know_where_to_begin(calm: Any, spec: Any) -> None:
    topology = PipelineTopology.model_validate({"units": {"encoder": {}, "llm": {}}})
    job = calm.submit(spec("in-places", steps=8))
    with trainer.connect(calm.endpoint, job=job) as loader:
        consume(loader, 3)
    device = torch.device("cpu")
    first, second = (
        PlacesLoader([PipelineLoader(calm.endpoint, job=job, topology=topology, place=topology.place(rank), device=device)])
        for rank in range(topology.world_size)
    )
    with JobsClient(calm.endpoint) as client, first, second:
        for loader in (first, second):
            loader.load_state_dict(at_step(loader, 2))
            assert loader.next_step == 2
        assert client.show(job).generation == 2, "set back once"
