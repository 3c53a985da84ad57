"""What is planned is what runs: jobs for colocated ranks, and pipelines that were planned for something else."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace import trainer
from headrace.cli.main import main
from headrace.execution_spec import ExecutionSpec
from headrace.ledger import ledger_sha256
from headrace.processes import Process, ProcessGroup
from headrace.spec import JobSpec, load_spec_json
from tests.integration.trainers import start, wait

pytestmark = pytest.mark.integration

MAX_TOKENS = 12_000


@pytest.mark.parametrize("meet", ["microbatch", "step"])
def test_colocated_ranks_get_the_same_samples_in_microbatches_that_are_not_too_long(calm, spec, undisturbed, meet: str) -> None:
    execution = {"trainer": "colocated", "meet": meet, "max_tokens": MAX_TOKENS}
    planned = {"replicas": 2, "microbatches": 3, "stages": {"encoder": 1, "llm": 1}}
    text = {"max_tokens": MAX_TOKENS}
    job = calm.submit(spec(f"colocated-{meet}", steps=4, execution=execution, topology=planned, text=text))
    with trainer.connect(calm.endpoint, job=job) as loader:
        for step in loader:
            assert all(int(microbatch.data.cu_seqlens[-1]) <= MAX_TOKENS for microbatch in step)
            loader.commit(step)
            with calm.client() as client:
                assert client.show_plan(job, step.index)[1].chosen == "colocated"
    assert ledger_sha256(calm.ledger(job)) == undisturbed(4)


def test_a_limit_that_no_plan_keeps_fails_the_job_with_the_sentence_and_it_can_go_on(calm, spec) -> None:
    planned = {"replicas": 1, "microbatches": 1, "stages": {"encoder": 1, "llm": 1}}
    execution = {"trainer": "colocated", "max_tokens": 2_000}
    job = calm.submit(spec("too-tight", steps=2, execution=execution, topology=planned, text={"max_tokens": 2_000}))
    message = calm.wait_for_state(job, "failed").message
    assert "of job 'too-tight' cannot be planned: no plan was found within max_tokens: the 16 samples" in message
    assert "its 1 microbatches room for 2,000 each" in message


def test_a_job_whose_batches_are_too_small_for_its_stages_is_told_how_large_they_should_be(calm, spec) -> None:
    planned = {"replicas": 1, "microbatches": 2, "stages": {"vision": 8, "audio": 8, "llm": 144}}
    job = calm.submit(spec("too-small", steps=8, topology=planned, model="1b"))
    with calm.client() as client:
        deadline_s = time.monotonic() + 60
        while not (warning := client.show(job).warning) and time.monotonic() < deadline_s:
            time.sleep(0.1)  # polls a real service
        client.cancel(job)
    assert "global_batch" in warning


@pytest.mark.slow
def test_trainers_that_run_something_else_are_told_before_their_first_step_until_the_job_is_planned_for_them(
    calm, spec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = {"replicas": 1, "microbatches": 2, "stages": {"encoder": 1, "llm": 1}}
    execution = {"trainer": "pipeline", "units": {"encoder": {"frozen": True}}}
    submitted = spec("planned-frozen", steps=1, topology=planned, execution=execution)
    job = calm.submit(submitted)
    (tmp_path / "job.yaml").write_text(submitted.to_json())
    with ProcessGroup() as group:
        processes = start(group, calm, job, tmp_path, {"encoder": {}, "llm": {}}, 2, 2)
        assert wait(processes) == [2, 2]
        sentence = "the job plans for frozen units encoder, but the topology of the trainers has none: change one of them"
        assert sentence in processes[0].last_words()
        assert not calm.ledger(job)
        assert main(["job", "topology", job, "--file", str(tmp_path / "topology.yaml"), "--endpoint", calm.endpoint]) == 0
        processes = start(group, calm, tmp_path / "job.yaml", tmp_path, None, 2, 2)
        assert wait(processes) == [0, 0], processes[0].last_words()
    assert len(calm.ledger(job)) == 1


def test_a_job_that_is_submitted_with_a_topology_is_planned_for_it(calm, spec, tmp_path: Path) -> None:
    submitted = submitted_with_a_topology(calm, tmp_path, spec("planned-for", steps=1), {"replicas": 1, "microbatches": 2})
    assert submitted.execution.schedule == "gpipe"
    assert submitted.topology.stages == {"encoder": 1, "llm": 1}, "the spec names none, so they are the topology's"


@pytest.mark.slow
def test_a_spec_that_names_other_stages_is_planned_as_it_was_and_its_user_told(calm, spec, tmp_path: Path) -> None:
    planned = {"replicas": 1, "microbatches": 2, "stages": {"encoder": 1, "llm": 3}}
    submitted = submitted_with_a_topology(calm, tmp_path, spec("planned-as-before", steps=1), planned)
    assert submitted.execution == ExecutionSpec()
    assert submitted.topology.stages == {"encoder": 1, "llm": 3}
    told = "the job's topology.stages are encoder 1, llm 3, but the topology of the trainers has encoder 1, llm 1"
    assert told in (tmp_path / "trainer.log").read_text()


def submitted_with_a_topology(cluster: Any, folder: Path, job: JobSpec, planned: dict[str, Any]) -> JobSpec:
    """Submit a job, with `planned` as its topology section, for trainers under gpipe; return its spec as the service has it."""
    document = json.loads(job.to_json())
    del document["execution"]
    (folder / "job.yaml").write_text(yaml.safe_dump({**document, "topology": planned}))
    with ProcessGroup() as group:
        process = group.add(train(cluster, folder, "--submit", str(folder / "job.yaml"), schedule="gpipe"))
        assert wait([process]) == [2], "a topology of two processes needs two"
    with cluster.client() as client:
        return load_spec_json(client.show(job.name).spec_json)


@pytest.mark.slow
def test_processes_of_an_encoder_with_replicas_of_its_own_take_what_the_plan_deals_them(
    calm, spec, undisturbed, tmp_path
) -> None:
    planned = {"replicas": 1, "microbatches": 2, "stages": {"encoder": 1, "llm": 1}}
    job = calm.submit(spec("dealt", steps=2, topology=planned, execution={"units": {"encoder": {"dp": 2}}}))
    with ProcessGroup() as group:
        processes = start(group, calm, job, tmp_path, {"encoder": {"dp": 2}, "llm": {}}, 3, 3)
        assert wait(processes) == [0] * 3, processes[0].last_words()
    with calm.client() as client:
        dealt = client.show_plan(job, 1)[1].unit_replicas["encoder"]
    assert all(any(samples for samples in replica) for replica in dealt)
    assert ledger_sha256(calm.ledger(job)) == undisturbed(2)


def train(cluster: Any, folder: Path, *options: str, **topology: Any) -> Process:
    """One process of `headrace train` with a topology of two units."""
    (folder / "topology.yaml").write_text(yaml.safe_dump({**topology, "units": {"encoder": {}, "llm": {}}}))
    arguments = ["train", "--endpoint", cluster.endpoint, "--threads", "1", "--topology", str(folder / "topology.yaml"), *options]
    return Process("trainer 0", arguments, folder / "trainer.log")
