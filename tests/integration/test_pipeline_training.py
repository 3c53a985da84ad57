"""`headrace train --topology`: a job's batches through a pipeline of processes, beside one process that trains on them alone."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from headrace.processes import ProcessGroup
from headrace.trainer.pipeline.routes import Routes
from tests.integration.trainers import END_S, Units, losses, start, wait

pytestmark = pytest.mark.integration

UNITS: Units = {"vision": {}, "audio": {}, "llm": {"pp": 2}}
STAGES = {"vision": 1, "audio": 1, "llm": 2}
PLANNED = {"replicas": 1, "microbatches": 2, "stages": STAGES}


def test_a_pipeline_trains_as_one_process_does(calm, spec, tmp_path: Path) -> None:
    """Its processes take their places from the job, which says that it is trained by a pipeline."""
    logs = {}
    planned = {**PLANNED, "stages": {**STAGES, "generator": 1}}
    pipeline = {"trainer": "pipeline", "units": {"llm": {"checkpointing": True}}}
    with ProcessGroup() as group:
        for name, execution, world in (("whole", {}, 1), ("pipeline", pipeline, 5)):
            job_name = f"{name}-{tmp_path.name[-1]}"  # another one where the test is tried again
            job = calm.submit(spec(job_name, steps=3, topology=planned, model="tiny-generator", execution=execution))
            processes = start(group, calm, job, tmp_path, None, world, world)
            assert wait(processes) == [0] * world, processes[0].last_words()
            logs[name] = [losses(process.log) for process in processes]
    [whole] = logs["whole"]
    assert len(whole) == 3
    for of_rank in logs["pipeline"]:
        assert of_rank == pytest.approx(whole, rel=1e-4)


def test_ranks_of_a_pipeline_that_share_sequences_train_as_one_process_does(calm, spec, tmp_path: Path) -> None:
    """The job says how many; the plan has one replica."""
    logs = {}
    planned = {"replicas": 1, "microbatches": 2, "stages": {"vision": 1, "audio": 1, "llm": 1}}
    shared = {"trainer": "pipeline", "units": {"llm": {"cp": 2, "checkpointing": True}}}
    with ProcessGroup() as group:
        for name, execution, world in (("together", {}, 1), ("shared", shared, 4)):
            job_name = f"{name}-{tmp_path.name[-1]}"
            job = calm.submit(spec(job_name, steps=3, topology=planned, execution=execution))
            processes = start(group, calm, job, tmp_path, None, world, world)
            assert wait(processes) == [0] * world, processes[0].last_words()
            logs[name] = [losses(process.log) for process in processes]
    [whole] = logs["together"]
    assert len(whole) == 3
    for of_rank in logs["shared"]:
        assert of_rank == pytest.approx(whole, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("llm", [{}, {"dp": 2, "shard_weights": True}], ids=["whole", "sharded"])
def test_a_job_goes_on_from_its_newest_checkpoint(calm, spec, tmp_path: Path, llm: dict[str, int]) -> None:
    """The last one was never finished: its step is trained again, and with the same result."""
    units: Units = {"encoder": {}, "llm": llm}
    replicas = llm.get("dp", 1)
    world = 1 + replicas
    planned = {"replicas": replicas, "microbatches": 2, "stages": {"encoder": 1, "llm": 1}}
    job = calm.submit(spec(f"resumed-{world}", steps=3, topology=planned))
    folder = tmp_path / "checkpoints"
    options = ["--checkpoint", str(folder), "--checkpoint-every", "2", "--precision", "bf16"]
    runs = []
    for resume in ([], ["--resume", str(folder)]):
        with ProcessGroup() as group:
            processes = start(group, calm, job, tmp_path, units, world, world, *options, *resume)
            assert wait(processes) == [0] * world, processes[0].last_words()
            runs.append(losses(processes[0].log))
        assert {path.name for path in folder.iterdir()} == {"step-00000002", "step-00000003"}
        (folder / "step-00000003" / f"0-of-{world}.arrow").unlink()
    assert len(runs[0]) == 3
    assert runs[1] == runs[0][2:]


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("units", "world", "sentence"),
    [
        ({"encoder": {}, "llm": {}}, 3, "needs 2 processes (encoder 1 x 1 x 1, llm 1 x 1 x 1), but there are 3"),
        (
            {"vision": {}, "llm": {}},
            2,
            "the job plans for the units encoder, llm, but the topology of the trainers has llm, vision",
        ),
        slow({"encoder": {"pp": 2}, "llm": {}}, 3, "name 'vision' and 'audio' in its place"),
        slow({"encoder": {}, "llm": {"pp": 9}}, 10, "lower its pp"),
        slow({"encoder": {}, "llm": {"dp": 3}}, 4, "has 2: give the llm as many, or `headrace job topology"),
    ],
)
def test_what_does_not_fit_is_one_clear_sentence(calm, spec, tmp_path: Path, units: Units, world: int, sentence: str) -> None:
    """Rank 0 says it, whether or not the others are there."""
    job = calm.submit(spec("misfit", steps=1))
    with ProcessGroup() as group:
        processes = start(group, calm, job, tmp_path, units, world, 1)
        assert wait(processes) == [2]
        assert sentence in processes[0].last_words()


@pytest.mark.slow
def test_samples_that_change_their_replica_train_as_in_one_process(calm, spec, tmp_path: Path) -> None:
    logs = {}
    planned = {"replicas": 2, "microbatches": 2, "stages": {"encoder": 1, "llm": 1}}
    with ProcessGroup() as group:
        for name, units, world in (("unmoved", None, 1), ("moved", {"encoder": {"dp": 2}, "llm": {"dp": 2}}, 4)):
            job = calm.submit(spec(name, steps=3, strategy="orchmllm", topology=planned))
            processes = start(group, calm, job, tmp_path, units, world, world)
            assert wait(processes) == [0] * world, processes[0].last_words()
            logs[name] = losses(processes[0].log)
    with calm.client() as client:
        plan = client.show_plan("moved", 2)[1]
    assert Routes(plan, {"encoder": 2, "llm": 2}).crosses
    assert len(logs["unmoved"]) == 3
    assert logs["moved"] == pytest.approx(logs["unmoved"], rel=1e-4)


@pytest.mark.slow
def test_when_one_process_dies_the_others_end(calm, spec, tmp_path: Path) -> None:
    job = calm.submit(spec("widowed", topology=PLANNED))
    with ProcessGroup() as group:
        processes = start(group, calm, job, tmp_path, UNITS, 4, 4)
        deadline = time.monotonic() + END_S
        while not losses(processes[0].log):
            assert time.monotonic() < deadline, processes[0].last_words()
            time.sleep(0.05)  # polls a real process
        os.kill(processes[1].pid, signal.SIGKILL)
        assert None not in wait(processes, timeout_s=20.0)
        assert all(process.exit_code() for process in processes)
