"""Frozen units in half precision learn the same whoever trains them: processes of a topology, or nodes that may be lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.cli.run.processes import Process, ProcessGroup, torchrun_environments
from tests.integration.trainers import losses, wait
from tests.wire import free_ports

pytestmark = pytest.mark.integration

UNITS: dict[str, Any] = {"encoder": {"frozen": True}, "llm": {"frozen": True}}
PLANNED = {"replicas": 1, "microbatches": 2, "stages": {"encoder": 1, "llm": 1}}
WAYS = {"topology": {"units": UNITS}, "nodes": {"units": UNITS, "nodes": 2, "max_failures": 0}}


@pytest.mark.slow
def test_nodes_learn_as_a_topology_does(calm, spec, tmp_path: Path) -> None:
    """Only the projectors of the encoder learn, through an LLM of which each process has one copy, in bfloat16."""
    trained = {}
    for way, document in WAYS.items():
        file = tmp_path / f"{way}.yaml"
        file.write_text(yaml.safe_dump(document))
        job = calm.submit(spec(f"frozen-{way}", steps=3, topology=PLANNED))
        arguments = ["train", "--endpoint", calm.endpoint, "--job", job, "--threads", "1", "--precision", "bf16"]
        environments = torchrun_environments(2, free_ports(1)[0]) if way == "topology" else [{}, {}]
        with ProcessGroup() as group:
            processes = [
                group.add(Process("trainer", [*arguments, f"--{way}", str(file)], tmp_path / f"{way}-{rank}.log", environment))
                for rank, environment in enumerate(environments)
            ]
            assert wait(processes) == [0, 0], processes[0].last_words()
            trained[way] = losses(processes[0].log)
    assert len(trained["topology"]) == 3
    assert trained["nodes"] == trained["topology"]
    assert len(set(trained["topology"])) == 3
