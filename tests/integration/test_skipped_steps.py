"""Steps that are no number, in every way of training: with `on_nan: skip` they are committed, and the job comes to its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.processes import Process, ProcessGroup, torchrun_environments
from tests.integration.trainers import wait
from tests.wire import free_ports

pytestmark = pytest.mark.integration

UNITS: dict[str, Any] = {"encoder": {}, "llm": {}}
PLANNED = {"replicas": 1, "microbatches": 2, "stages": {"encoder": 1, "llm": 1}}
WAYS = {
    "optimizer": (1, {}),
    "topology": (2, {"units": UNITS}),
    "nodes": (2, {"units": UNITS, "nodes": 2, "max_failures": 0}),
}
"""By the option that names the file: how many processes, and what stands in the file besides the section `optimizer:`."""
EACH_WAY = ["optimizer", pytest.param("topology", marks=pytest.mark.slow), pytest.param("nodes", marks=pytest.mark.slow)]
DIVERGES = {"learning_rate": 1e30, "warmup_steps": 0}  # step 0 is finite; no loss is, once its update is taken


def start(group: ProcessGroup, cluster: Any, job: str, folder: Path, way: str, optimizer: dict[str, Any]) -> list[Process]:
    count, rest = WAYS[way]
    file = folder / f"{way}.yaml"
    file.write_text(yaml.safe_dump({**rest, "optimizer": optimizer}))
    arguments = ["train", "--endpoint", cluster.endpoint, "--job", job, "--threads", "1", f"--{way}", str(file)]
    environments = torchrun_environments(count, free_ports(1)[0]) if way == "topology" else [{}] * count
    return [
        group.add(Process(f"trainer {rank}", arguments, folder / f"{rank}.log", environment))
        for rank, environment in enumerate(environments)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("way", EACH_WAY)
def test_skipped_steps_are_committed_and_told(calm, spec, tmp_path: Path, way: str) -> None:
    job = calm.submit(spec(f"skips-{way}", steps=3, topology=PLANNED))
    with ProcessGroup() as group:
        processes = start(group, calm, job, tmp_path, way, DIVERGES | {"on_nan": "skip"})
        assert wait(processes) == [0] * len(processes), processes[0].last_words()
        logs = [process.log.read_text() for process in processes]
    for log in logs:
        told = [line for line in log.splitlines() if "update skipped, the step is not finite" in line]
        assert [line.partition("step=")[2][:1] for line in told] == ["1", "2"]
        assert [line.partition("skipped_in_row=")[2][:1] for line in told] == ["1", "2"]
    entries = calm.ledger(job)
    assert [entry.step for entry in entries] == [0, 1, 2]
    samples = [sample for entry in entries for sample in entry.samples]
    assert len(samples) == len(set(samples)), "none is repeated within an epoch"


@pytest.mark.parametrize("way", EACH_WAY)
def test_one_too_many_ends_training_before_it_is_committed(calm, spec, tmp_path: Path, way: str) -> None:
    job = calm.submit(spec(f"ends-{way}", steps=4, topology=PLANNED))
    with ProcessGroup() as group:
        processes = start(group, calm, job, tmp_path, way, DIVERGES | {"on_nan": "skip", "max_skips_in_row": 1})
        assert all(wait(processes)), processes[0].last_words()
        words = processes[-1].last_words()
    assert "the 1 before it were skipped as well (optimizer.max_skips_in_row)" in words
    assert [entry.step for entry in calm.ledger(job)] == [0, 1]
