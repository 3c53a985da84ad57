"""Frozen units in half precision learn the same whoever trains them: processes of a topology, or nodes that may be lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.processes import Process, ProcessGroup, torchrun_environments
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


@pytest.mark.slow
def test_first_layers_that_are_frozen_stay_so_however_the_unit_is_cut(calm, spec, tmp_path: Path) -> None:
    """The encoder and the LLM's first three of four layers are frozen: of two stages, the first has no backward."""
    trained = []
    for pp in (1, 2):
        units = {
            "encoder": {"frozen": True, "frozen_projector": True},
            "llm": {"frozen_layers": 3, "pp": pp, "cuts": [2][: pp - 1]},
        }
        file = tmp_path / f"pp-{pp}.yaml"
        file.write_text(yaml.safe_dump({"units": units, "optimizer": {"learning_rate": 1e-2}}))
        planned = {**PLANNED, "stages": {"encoder": 1, "llm": pp}}
        job = calm.submit(spec(f"first-layers-{pp}", steps=3, topology=planned))
        arguments = ["train", "--endpoint", calm.endpoint, "--job", job, "--threads", "1", "--topology", str(file)]
        with ProcessGroup() as group:
            processes = [
                group.add(Process("trainer", arguments, tmp_path / f"pp-{pp}-{rank}.log", environment))
                for rank, environment in enumerate(torchrun_environments(1 + pp, free_ports(1)[0]))
            ]
            assert wait(processes) == [0] * (1 + pp), processes[0].last_words()
            trained.append(losses(processes[0].log))
    assert trained[0] == pytest.approx(trained[1], rel=1e-4)
    assert trained[0][0] != trained[0][-1]
