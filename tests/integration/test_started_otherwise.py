"""Processes of a pipeline that were started otherwise than the others, or than the checkpoint that they go on from says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.processes import Process, ProcessGroup, torchrun_environments
from tests.integration.trainers import wait
from tests.wire import free_ports

pytestmark = pytest.mark.integration

PLANNED = {"replicas": 1, "microbatches": 2, "stages": {"encoder": 1, "llm": 1}}


def start(group: ProcessGroup, cluster: Any, job: str, folder: Path, *options: list[str]) -> list[Process]:
    """An encoder and an llm, each with options of its own."""
    topology = folder / "topology.yaml"
    topology.write_text(yaml.safe_dump({"units": {"encoder": {}, "llm": {}}}))
    arguments = ["train", "--endpoint", cluster.endpoint, "--job", job, "--threads", "1", "--topology", str(topology)]
    return [
        group.add(Process(f"trainer {rank}", [*arguments, *options[rank]], folder / f"{rank}.log", environment))
        for rank, environment in enumerate(torchrun_environments(2, free_ports(1)[0]))
    ]


def test_a_process_of_another_precision_is_told_before_it_sends_anything(calm, spec, tmp_path: Path) -> None:
    job = calm.submit(spec("otherwise", steps=1, topology=PLANNED))
    with ProcessGroup() as group:
        processes = start(group, calm, job, tmp_path, ["--precision", "fp32"], ["--precision", "bf16"])
        assert wait(processes) == [2, 2]
        for process in processes:
            assert "processes 1 were started otherwise than process 0" in process.last_words()
    assert not calm.ledger(job)


@pytest.mark.slow
def test_a_process_that_finds_no_checkpoint_ends_the_others_too(calm, spec, tmp_path: Path) -> None:
    """They wait for it already: it ends before it has a process group with them."""
    job = calm.submit(spec("no-checkpoint", steps=1, topology=PLANNED))
    with ProcessGroup() as group:
        processes = start(group, calm, job, tmp_path, [], ["--resume", str(tmp_path / "nowhere")])
        assert all(wait(processes))
        for process in processes:
            assert "rank 1 (llm replica 0, stage 0, slice 0): " in process.log.read_text()
            assert "nowhere" in process.log.read_text()


@pytest.mark.slow
def test_who_goes_on_in_another_precision_is_warned(calm, spec, tmp_path: Path) -> None:
    job = calm.submit(spec("goes-on", steps=2, topology=PLANNED))
    folder = tmp_path / "checkpoints"
    options = ["--checkpoint", str(folder), "--checkpoint-every", "1"]
    with ProcessGroup() as group:
        processes = start(group, calm, job, tmp_path, options, options)
        assert wait(processes) == [0, 0], processes[0].last_words()
    (folder / "step-00000002" / "0-of-2.arrow").unlink()
    options += ["--resume", str(folder), "--precision", "bf16"]
    with ProcessGroup() as group:
        processes = start(group, calm, job, tmp_path, options, options)
        assert wait(processes) == [0, 0], processes[0].last_words()
        [warning] = [line for line in processes[0].log.read_text().splitlines() if "goes on otherwise than saved" in line]
    assert "what=products" in warning
