"""A loader's place in its job goes into checkpoints and comes back out of them, as torch.distributed.checkpoint does it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful

from headrace import trainer
from headrace.errors import ConflictError
from headrace.ledger import ledger_sha256
from tests.integration.consuming import consume

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
]


def saved_at_2_of_4(cluster: Any, job: str, folder: Path) -> None:
    with trainer.connect(cluster.endpoint, job=job) as loader:
        assert isinstance(loader, Stateful)
        consume(loader, 2)
        dcp.save({"loader": loader}, checkpoint_id=folder)
        consume(loader, 4)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_distributed_checkpoint_takes_the_loader_back_to_its_step(
    calm: Any, spec: Any, undisturbed: Any, tmp_path: Path, is_open: bool
) -> None:
    """Also where its session was opened before, to look at the spec, say."""
    job = calm.submit(spec(f"dcp-{is_open}", steps=8))
    saved_at_2_of_4(calm, job, tmp_path)
    loader = trainer.connect(calm.endpoint, job=job)
    if is_open:
        assert loader.open().next_step == 4
    dcp.load({"loader": loader}, checkpoint_id=tmp_path)
    assert loader.state_dict()["step"] == 2
    with loader:
        assert consume(loader) == [2, 3, 4, 5, 6, 7]
    assert ledger_sha256(calm.ledger(job)) == undisturbed(8)


def test_a_state_that_is_asked_for_before_the_first_step_opens_nothing(spec: Any) -> None:
    loader = trainer.connect("127.0.0.1:1", job="nobody-answers")
    state = loader.state_dict()
    assert state["step"] is None
    loader.load_state_dict(state | {"step": 3})
    assert loader.state_dict()["step"] == 3
    loader.close()


def test_a_state_that_names_no_step_goes_on_behind_the_last_commit(calm: Any, spec: Any) -> None:
    job = calm.submit(spec("no-step", steps=3))
    first = trainer.connect(calm.endpoint, job=job)
    state = first.state_dict()
    with first:
        consume(first, 2)
    with trainer.connect(calm.endpoint, job=job) as loader:
        loader.load_state_dict(state)
        assert consume(loader) == [2]


def test_once_a_step_was_handed_out_it_is_too_late_to_go_back(calm: Any, spec: Any) -> None:
    job = calm.submit(spec("too-late", steps=2))
    with trainer.connect(calm.endpoint, job=job) as loader:
        state = loader.state_dict()
        next(iter(loader))
        with pytest.raises(ConflictError, match="before the first step"):
            loader.load_state_dict(state)


def test_a_commit_has_returned_only_when_every_rank_s_samples_are_in_the_ledger(calm: Any, spec: Any) -> None:
    """Whatever a rank saves behind its commit can be resumed, also where everything is lost at once."""
    job = calm.submit(spec("durable", steps=2))
    lengths: list[int] = []

    def train(rank: int, ready: threading.Event) -> None:
        with trainer.connect(calm.endpoint, job=job, rank=rank, num_ranks=2) as loader:
            for step in loader:
                list(step)
                ready.wait(60)
                loader.commit(step)
                lengths.append(len(calm.ledger(job)))

    now, later = threading.Event(), threading.Event()
    now.set()
    ranks = [threading.Thread(target=train, args=args) for args in ((0, now), (1, later))]
    for rank in ranks:
        rank.start()
    with calm.client() as client:
        deadline = time.monotonic() + 60
        while [rank.committed_steps for rank in client.show(job).ranks] != [1, 0]:  # rank 0 has said its commit
            assert time.monotonic() < deadline
            time.sleep(0.02)  # polls a real service
    assert (lengths, calm.ledger(job)) == ([], [])
    later.set()
    for rank in ranks:
        rank.join(60)
    assert sorted(lengths)[:2] >= [1, 1]
    assert len(lengths) == 4


def test_one_thread_may_commit_for_several_ranks(calm: Any, spec: Any) -> None:
    job = calm.submit(spec("one-thread", steps=3))
    loaders = [trainer.connect(calm.endpoint, job=job, rank=rank, num_ranks=2) for rank in range(2)]
    with loaders[0], loaders[1]:
        for steps in zip(*loaders, strict=True):
            for loader, step in zip(loaders, steps, strict=True):
                list(step)
                loader.commit(step)
            assert len(calm.ledger(job)) == steps[0].index + 1
