"""`headrace train --topology` and `--nodes` begin with fresh weights only where the job begins too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import trainer
from headrace.processes import Process, ProcessGroup
from tests.integration.trainers import losses, start, wait

pytestmark = pytest.mark.integration

UNITS: dict[str, Any] = {"encoder": {}, "llm": {}}
NODES = {"nodes": 2, "max_failures": 0, "units": UNITS}
REFUSAL = "committed 1 step(s), which fresh weights have not seen: go on from a checkpoint"


@pytest.fixture
def begun(calm: Any, spec: Callable[..., Any], request: pytest.FixtureRequest) -> str:
    """A job of which one step is committed."""
    planned = {"replicas": 1, "microbatches": 2, "stages": dict.fromkeys(UNITS, 1)}
    job: str = calm.submit(spec(request.node.name.replace("_", "-")[-63:].strip("-"), steps=3, topology=planned))
    with trainer.connect(calm.endpoint, job=job) as loader:
        for step in loader:
            for _ in step:
                pass
            loader.commit(step, loss=1.0)
            return job
    raise AssertionError("the job has no step")


@pytest.mark.slow
def test_a_pipeline_refuses_a_job_that_has_begun(calm: Any, begun: str, tmp_path: Path) -> None:
    with ProcessGroup() as group:
        processes = start(group, calm, begun, tmp_path, UNITS, 2, 2)
        assert_refused(calm, begun, processes)


def test_a_job_that_was_lost_before_its_first_checkpoint_begins_anew(calm: Any, begun: str, tmp_path: Path) -> None:
    """Whoever starts it again need not know that: the folder to save to is the one to go on from."""
    folder = str(tmp_path / "checkpoints")
    with ProcessGroup() as group:
        processes = start(group, calm, begun, tmp_path, UNITS, 2, 2, "--checkpoint", folder, "--resume", folder)
        assert wait(processes) == [0, 0], processes[0].last_words()
    assert len(losses(processes[0].log)) == 3, "also the step that was committed is trained"
    assert "no checkpoint yet: the job begins anew" in processes[0].log.read_text()
    assert (tmp_path / "checkpoints" / "step-00000003").is_dir()


@pytest.mark.slow
def test_a_folder_that_lacks_more_checkpoints_than_one_undoes_nothing(calm: Any, begun: str, tmp_path: Path) -> None:
    """With a checkpoint each step, two may be committed without any: another folder is meant."""
    folder = str(tmp_path / "checkpoints")
    with trainer.connect(calm.endpoint, job=begun) as loader:
        for step in loader:
            for _ in step:
                pass
            loader.commit(step, loss=1.0)
    options = ["--checkpoint", folder, "--resume", folder, "--checkpoint-every", "1"]
    with ProcessGroup() as group:
        processes = start(group, calm, begun, tmp_path, UNITS, 2, 2, *options)
        assert all(wait(processes))
        assert "no whole checkpoint, but job" in processes[0].last_words()
        assert "has committed 3 steps" in processes[1].log.read_text(), "the others say it, too"
    with calm.client() as client:
        assert client.show(begun).committed_steps == 3


@pytest.mark.slow
def test_nodes_refuse_a_job_that_has_begun(calm: Any, begun: str, tmp_path: Path) -> None:
    (tmp_path / "nodes.yaml").write_text(json.dumps(NODES))
    arguments = ["train", "--endpoint", calm.endpoint, "--job", begun, "--threads", "1", "--nodes", str(tmp_path / "nodes.yaml")]
    with ProcessGroup() as group:
        nodes = [group.add(Process(name, [*arguments, "--node", name], tmp_path / f"{name}.log")) for name in ("a", "b")]
        assert_refused(calm, begun, nodes)


def assert_refused(cluster: Any, job: str, processes: list[Process]) -> None:
    """All have ended: who looked said why, and the others may have been told of it."""
    codes = wait(processes)
    refused = [code for code, process in zip(codes, processes, strict=True) if REFUSAL in process.last_words()]
    assert refused, processes[0].last_words()
    assert 2 in refused
    assert all(codes), codes
    with cluster.client() as client:
        assert client.show(job).committed_steps == 1
