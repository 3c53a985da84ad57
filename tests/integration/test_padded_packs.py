"""Packs of one length reach every kind of trainer, and training is the same as without padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace import trainer
from headrace.ledger import ledger_sha256
from headrace.processes import Process, ProcessGroup, torchrun_environments
from headrace.spec import JobSpec
from tests.integration.trainers import losses, wait
from tests.wire import free_ports

pytestmark = pytest.mark.integration

PACK_TOKENS = 2048
PADDED = {"pack_tokens": PACK_TOKENS, "pad_to_max_length": True, "text": {"max_tokens": PACK_TOKENS}}
COLOCATED = {"trainer": "colocated", "max_tokens": 3 * PACK_TOKENS}
UNITS: dict[str, Any] = {"encoder": {}, "llm": {}}
PLANNED = {"replicas": 1, "microbatches": 3, "stages": {"encoder": 1, "llm": 1}}


@pytest.mark.parametrize("execution", [{}, COLOCATED], ids=["pipeline", "colocated"])
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


def train(cluster: Any, spec: JobSpec, folder: Path, documents: dict[str, Any], world: int) -> list[float]:
    """The losses of a job. documents: of the option that names how to train, such as `topology`; empty: alone."""
    arguments = ["train", "--endpoint", cluster.endpoint, "--job", cluster.submit(spec), "--threads", "1"]
    for way, document in documents.items():
        (folder / way).write_text(yaml.safe_dump(document))
        arguments += [f"--{way}", str(folder / way)]
    environments = torchrun_environments(world, free_ports(1)[0]) if "topology" in documents else [{}] * world
    with ProcessGroup() as group:
        processes = [
            group.add(Process("trainer", arguments, folder / f"{spec.name}-{rank}.log", environment))
            for rank, environment in enumerate(environments)
        ]
        assert wait(processes) == [0] * world, processes[0].last_words()
        return losses(processes[0].log)


@pytest.mark.parametrize(
    ("documents", "world"),
    [
        pytest.param({}, 1, marks=pytest.mark.slow),
        pytest.param({"topology": {"units": UNITS}}, 2, marks=pytest.mark.slow),
        pytest.param({"nodes": {"units": UNITS, "nodes": 2, "max_failures": 0}}, 2, marks=pytest.mark.slow),
    ],
    ids=["alone", "topology", "nodes"],
)
def test_training_on_padded_packs_is_training_on_the_samples(
    calm, spec, tmp_path: Path, documents: dict[str, Any], world: int
) -> None:
    """Beside one process that trains on the samples alone."""
    name = next(iter(documents), "alone")
    plain = train(calm, spec(f"beside-{name}", steps=2, topology=PLANNED), tmp_path, {}, 1)
    padded = train(calm, spec(f"padded-{name}", steps=2, topology=PLANNED, **PADDED), tmp_path, documents, world)
    assert len(padded) == 2
    assert padded == pytest.approx(plain, rel=1e-5)
