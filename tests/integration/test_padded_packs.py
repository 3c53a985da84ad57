"""Packs of one length reach every kind of trainer, and training is the same as without padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace import trainer
from headrace.cli.run.processes import Process, ProcessGroup, torchrun_environments
from headrace.ledger import ledger_sha256
from tests.integration.trainers import losses, wait
from tests.wire import free_ports

pytestmark = pytest.mark.integration

PACK_TOKENS = 2048
PADDED = {"pack_tokens": PACK_TOKENS, "pad_to_max_length": True, "text": {"max_tokens": PACK_TOKENS}}
UNITS: dict[str, Any] = {"encoder": {}, "llm": {"pp": 2}}
PLANNED = {"replicas": 1, "microbatches": 3, "stages": {"encoder": 1, "llm": 2}}


@pytest.mark.parametrize("execution", [{}, {"trainer": "colocated", "max_tokens": 3 * PACK_TOKENS}], ids=["pipeline", "colocated"])
def test_every_pack_has_the_length_asked_for_and_every_sample_comes_once(calm, spec, undisturbed, execution) -> None:
    planned = {"replicas": 2, "microbatches": 3, "stages": {"encoder": 1, "llm": 1}}
    kind = execution.get("trainer", "pipeline")
    job = calm.submit(spec(f"one-length-{kind}", steps=4, topology=planned, execution=execution, **PADDED))
    with trainer.connect(calm.endpoint, job=job) as loader:
        for step in loader:
            samples = []
            for data in (microbatch.data for microbatch in step):
                assert set(data.pack_offsets.diff().tolist()) <= {PACK_TOKENS}
                assert len(data.input_ids) == data.pack_offsets[-1] <= execution.get("max_tokens", len(data.input_ids))
                samples += data.sample_ids.tolist()
            assert len(samples) == len(set(samples)) == step.num_samples
            loader.commit(step)
    assert ledger_sha256(calm.ledger(job)) == undisturbed(4)


@pytest.mark.parametrize("way", ["alone", "topology", pytest.param("nodes", marks=pytest.mark.slow)])
def test_training_on_padded_packs_is_training_on_the_samples(calm, spec, tmp_path: Path, way: str) -> None:
    trained = {}
    for name, fields in (("plain", {}), ("padded", PADDED)):
        job = calm.submit(spec(f"{name}-{way}", steps=3, topology=PLANNED, **fields))
        arguments = ["train", "--endpoint", calm.endpoint, "--job", job, "--threads", "1"]
        file = tmp_path / f"{way}.yaml"
        world = {"alone": 1, "topology": 3, "nodes": 2}[way]
        environments: list[dict[str, str]] = [{}] * world
        if way == "topology":
            file.write_text(yaml.safe_dump({"units": UNITS}))
            environments = torchrun_environments(world, free_ports(1)[0])
        if way == "nodes":
            file.write_text(yaml.safe_dump({"units": {"encoder": {}, "llm": {}}, "nodes": 2, "max_failures": 0}))
        if way != "alone":
            arguments += [f"--{way}", str(file)]
        with ProcessGroup() as group:
            processes = [
                group.add(Process("trainer", arguments, tmp_path / f"{job}-{rank}.log", environment))
                for rank, environment in enumerate(environments)
            ]
            assert wait(processes) == [0] * world, processes[0].last_words()
            trained[name] = losses(processes[0].log)
    assert len(trained["padded"]) == 3
    assert trained["padded"] == pytest.approx(trained["plain"], rel=1e-5)
