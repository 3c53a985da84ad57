"""Loops that know no commits: their steps are committed as they go on, and their checkpoints name the last step applied."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from headrace import trainer
from headrace.errors import ConflictError
from headrace.ledger import ledger_sha256
from headrace.sample import LABEL_IGNORED
from headrace.trainer.integrations.dynamic_batches import DynamicBatches
from headrace.trainer.integrations.model_inputs import packed_inputs
from headrace.trainer.integrations.step_stream import StepStream
from headrace.trainer.integrations.validation_batches import ValidationBatches

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
]


@pytest.mark.parametrize("ends_at", [2, 4])
def test_a_loop_over_lists_of_micro_batches_is_killed_and_goes_on_from_a_distributed_checkpoint_with_two_ranks(
    calm: Any, spec: Any, undisturbed: Any, tmp_path: Any, ends_at: int
) -> None:
    """The checkpoint has 3 steps; the ledger has fewer or more when the loop ends."""
    job = calm.submit(spec(f"dynamic-{ends_at}", steps=8))
    with trainer.connect(calm.endpoint, job=job) as loader:
        batches = DynamicBatches(loader)
        for number, micro_batches in enumerate(batches):
            found = sum(int((micro_batch["labels"] != LABEL_IGNORED).sum()) for micro_batch in micro_batches)
            assert (len(micro_batches), found) == (4, batches._stream.step.num_targets)
            if number == 2:
                dcp.save({"loader": batches}, checkpoint_id=tmp_path)
            if number == ends_at:
                break
    assert len(calm.ledger(job)) == ends_at, "the last step is not committed"
    loaders = [trainer.connect(calm.endpoint, job=job, rank=rank, num_ranks=2) for rank in range(2)]
    for loader in loaders:
        batches = DynamicBatches(loader)
        dcp.load({"loader": batches}, checkpoint_id=tmp_path)
        assert batches.state_dict()["step"] == 3
    with loaders[0], loaders[1]:
        for steps in zip(*loaders, strict=True):
            for loader, step in zip(loaders, steps, strict=True):
                list(step)
                loader.commit(step)
    assert ledger_sha256(calm.ledger(job)) == undisturbed(8)


def test_a_step_is_committed_neither_before_it_is_consumed_nor_in_place_of_a_loop_that_says_when(calm: Any, spec: Any) -> None:
    job = calm.submit(spec("stream", steps=2))
    with trainer.connect(calm.endpoint, job=job) as loader:
        stream = StepStream(loader, commits_when_asked=True)
        stream.load_state_dict({})  # of a checkpoint without one
        step = stream.next_step()
        assert step is not None
        next(iter(step))
        with pytest.raises(ConflictError, match=r"before it took all 4 microbatches that step 0"):
            stream.state_dict()
    with trainer.connect(calm.endpoint, job=job) as loader:
        stream = StepStream(loader, commits_when_asked=False)
        list(stream.next_step() or ())
        assert stream.state_dict()["step"] == 0, "it is not said that the step is applied"
        with pytest.raises(ConflictError, match="step 0 is not committed"):
            stream.next_step()
        with pytest.raises(ConflictError, match="step 0 is not committed, and an evaluation of 'web'"):
            next(stream.evaluate("web"))
        stream.commit()
        assert stream.state_dict()["step"] == 1


def test_batches_of_a_validation_set_come_between_steps_and_each_iteration_is_a_pass(calm: Any, spec: Any, tmp_path: Any) -> None:
    (tmp_path / "web.jsonl").write_text("\n".join(json.dumps({"text": "word " * number}) for number in range(1, 22)))
    sets = {"web": {"sources": [{"path": str(tmp_path / "web.jsonl")}]}}
    job = calm.submit(spec("validated", steps=1, validation=sets))
    with trainer.connect(calm.endpoint, job=job) as loader:
        stream = StepStream(loader, commits_when_asked=True)
        batches = ValidationBatches(stream, "web", lambda microbatch: packed_inputs(microbatch.data, loader.vocabulary))
        list(stream.next_step() or ())
        next(iter(batches))  # a pass that is broken off
        assert len(calm.ledger(job)) == 1, "the step is committed before"
        for _ in range(2):
            found = [(int((batch["labels"] != LABEL_IGNORED).sum()), batch["target_weight"]) for batch in batches]
            assert all(targets == weight for targets, weight in found)
            assert batches.num_samples == 21


def test_a_state_of_another_job_or_library_is_refused_with_both_names(spec: Any) -> None:
    stream = StepStream(trainer.connect("127.0.0.1:1", job="mine"), commits_when_asked=True)
    for state, theirs in (({"version": 1, "job": "yours", "generation": 0, "step": 3}, "'yours'"), ({"world_size": 2}, "None")):
        with pytest.raises(ConflictError, match=f"of job {theirs}.*of job 'mine'"):
            stream.load_state_dict(state)
    stream.loader.close()
