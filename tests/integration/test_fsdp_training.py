"""`headrace train --fsdp`: real processes that have all units each, beside one process that trains the same job alone."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.processes import ProcessGroup
from tests.integration.trainers import losses, start, wait

pytestmark = pytest.mark.integration

UNITS = {"vision": 1, "audio": 1, "llm": 1}
FSDP: dict[str, Any] = {"trainer": "fsdp"}
slow = partial(pytest.param, marks=pytest.mark.slow)


def planned(ranks: int, microbatches: int = 2) -> dict[str, Any]:
    return {"replicas": ranks, "microbatches": microbatches, "stages": UNITS}


def trained(calm, folder: Path, job: str | Path, world: int, *options: str) -> list[Path]:
    """The logs of the ranks, which train it to its end."""
    with ProcessGroup() as group:
        processes = start(group, calm, job, folder, None, world, world, *options)
        assert wait(processes) == [0] * world, processes[0].last_words()
        return [process.log for process in processes]


def exchanged(log: Path) -> tuple[int, int]:
    [found] = re.findall(r"exchanged: (\d+) bytes sent, (\d+) planned", log.read_text())
    return int(found[0]), int(found[1])


def test_two_ranks_train_three_units_as_one_process_does_and_send_what_is_planned(calm, spec, tmp_path: Path) -> None:
    whole = calm.submit(spec("fsdp-whole", steps=3, topology=planned(2)))
    [alone] = trained(calm, tmp_path, whole, 1)
    submitted = tmp_path / "fsdp.yaml"
    submitted.write_text(spec("fsdp", steps=3, topology=planned(2), execution=FSDP).to_json())
    logs = trained(calm, tmp_path, submitted, 2, "--fsdp")
    assert len(losses(alone)) == 3
    for log in logs:
        assert losses(log) == pytest.approx(losses(alone), rel=1e-4)
        sent, said = exchanged(log)
        assert sent == said > 0
    with calm.client() as client:
        plan = client.show_plan("fsdp", 0)[1]
        assert plan.chosen == "orchmllm", "what `auto` takes for such ranks"
    assert len(calm.ledger("fsdp")) == 3


def test_two_ranks_that_share_sequences_train_as_one_process_does(calm, spec, tmp_path: Path) -> None:
    """Each sequence is on as many of them as the plan says, which the data are fetched and exchanged by, too."""
    whole = calm.submit(spec("shared-whole", steps=3, global_batch=3, topology=planned(1, 1)))
    execution = {**FSDP, "units": {"llm": {"cp": "auto"}}}
    job = calm.submit(spec("shared-sequences", steps=3, global_batch=3, topology=planned(2, 1), execution=execution))
    alone, logs = losses(trained(calm, tmp_path, whole, 1)[0]), trained(calm, tmp_path, job, 2, "--fsdp")
    with calm.client() as client:
        degrees = [client.show_plan(job, step)[1].degrees for step in range(3)]
    assert any(degrees), "some sequence is shared"
    for log in logs:
        assert losses(log) == pytest.approx(alone, rel=1e-4)
        sent, said = exchanged(log)
        assert sent == said > 0
    assert len(calm.ledger(job)) == 3


@pytest.mark.parametrize(
    ("execution", "ranks", "world", "options", "sentence"),
    [
        (FSDP, 2, 3, [], "is planned for 2 FSDP ranks, and there are 3: start 2 processes by torchrun, or plan it anew with"),
        ({"trainer": "pipeline"}, 2, 2, ["--fsdp"], "says trainer: pipeline in its execution, and --fsdp is for jobs with"),
        slow({}, 2, 2, ["--fsdp"], "says no trainer in its execution, and --fsdp is for jobs with"),
        slow(FSDP, 2, 2, ["--shard-ranks", "3"], "--shard-ranks is 3, which does not divide the 2 ranks"),
        slow({}, 1, 1, ["--shard-ranks", "1"], "--shard-ranks goes with FSDP ranks"),
    ],
)
def test_what_does_not_fit_is_one_sentence_before_anything_is_computed(
    calm, spec, tmp_path: Path, execution: dict[str, Any], ranks: int, world: int, options: list[str], sentence: str
) -> None:
    """Rank 0 says it, whether or not the others are there."""
    name = re.sub(r"\W+", "-", sentence)[:40].strip("-")
    job = calm.submit(spec(name, steps=1, topology=planned(ranks), execution=execution))
    with ProcessGroup() as group:
        processes = start(group, calm, job, tmp_path, None, world, 1, *options)
        assert wait(processes) == [2]
        assert sentence in processes[0].last_words()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_goes_on_on_another_number_of_ranks(calm, spec, tmp_path: Path, headrace) -> None:
    """The losses are those of a job that one process has trained without a stop."""
    [alone] = trained(calm, tmp_path, calm.submit(spec("resumed-whole", steps=4, topology=planned(1))), 1)
    folder = tmp_path / "checkpoints"
    job = calm.submit(spec("resumed-fsdp", steps=4, topology=planned(4), execution=FSDP))
    options = ["--checkpoint", str(folder), "--checkpoint-every", "2"]
    first = losses(trained(calm, tmp_path, job, 4, *options)[0])
    assert first == pytest.approx(losses(alone), rel=1e-4)
    for path in (folder / "step-00000004").iterdir():
        path.unlink()
    for change in (["reset", job, "--step", "2"], ["topology", job, "--replicas", "2"]):
        done = headrace("job", *change, "--endpoint", calm.endpoint, timeout_s=60)
        assert done.returncode == 0, done.stderr
    second = losses(trained(calm, tmp_path, job, 2, "--resume", str(folder), "--shard-ranks", "1")[0])
    assert second == pytest.approx(losses(alone)[2:], rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_goes_on_in_a_pipeline_and_back_on_fsdp_ranks(calm, spec, tmp_path: Path, headrace) -> None:
    """The losses are those of a job that one process has trained without a stop."""
    [alone] = trained(calm, tmp_path, calm.submit(spec("moved-whole", steps=4, topology=planned(1))), 1)
    execution = {**FSDP, "units": {"llm": {"checkpointing": True}}}
    job = calm.submit(spec("moved", steps=4, topology=planned(2), execution=execution))
    of_fsdp, of_pipeline, topology = tmp_path / "of-fsdp", tmp_path / "of-pipeline", tmp_path / "pipeline.yaml"
    topology.write_text("units: {vision: {}, audio: {}, llm: {dp: 2, checkpointing: true}}")

    def go_back(step: int, folder: Path, *planned_for: str) -> None:
        for path in (folder / "step-00000004").iterdir():
            path.unlink()
        for change in (["reset", job, "--step", str(step)], ["topology", job, *planned_for]):
            done = headrace("job", *change, "--endpoint", calm.endpoint, timeout_s=60)
            assert done.returncode == 0, done.stderr

    trained(calm, tmp_path, job, 2, "--checkpoint", str(of_fsdp), "--checkpoint-every", "2")
    go_back(2, of_fsdp, "--file", str(topology))
    saving = ["--checkpoint", str(of_pipeline), "--checkpoint-every", "1"]
    logs = trained(calm, tmp_path, job, 4, "--topology", str(topology), "--resume", str(of_fsdp), *saving)
    assert losses(logs[-1]) == pytest.approx(losses(alone)[2:], rel=1e-4)
    go_back(3, of_pipeline, "--fsdp-ranks", "2")
    logs = trained(calm, tmp_path, job, 2, "--fsdp", "--resume", str(of_pipeline))
    assert losses(logs[0]) == pytest.approx(losses(alone)[3:], rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_validation_sets_frozen_units_and_padded_ones_in_bfloat16(calm, spec, tmp_path: Path) -> None:
    from headrace.cli.example import example_data

    execution = {**FSDP, "units": {"vision": {"frozen": True, "frozen_projector": True}, "llm": {"checkpointing": True}}}
    validation = {"held": {"sources": [{"path": str(example_data() / "sound-00000.tar")}]}}
    forms = {"forms": {"vision": "padded", "audio": "fourth"}}
    topology = planned(2)
    document = spec("fsdp-frozen", steps=2, topology=topology, execution=execution, validation=validation, orchmllm=forms)
    logs = trained(calm, tmp_path, calm.submit(document), 2, "--precision", "bf16", "--evaluate-every", "1")
    assert len(losses(logs[0])) == 2
    evaluated = re.findall(r"evaluated .* loss=([\d.]+) ", logs[0].read_text())
    assert len(evaluated) == 3
    assert re.findall(r"evaluated .* loss=([\d.]+) ", logs[1].read_text()) == evaluated
    sent, said = exchanged(logs[0])
    assert sent == said > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_example_trains_on_two_ranks_as_on_one(calm, spec, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "orchestrated_fsdp.py"
    printed = {}
    for ranks in (1, 2):
        job = calm.submit(spec(f"own-{ranks}", steps=3, global_batch=8, topology=planned(ranks), execution=FSDP))
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *launcher, str(script), "--endpoint", calm.endpoint, "--job", job]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert len(calm.ledger(job)) == 3
        printed[ranks] = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(printed[1]) == 3
    assert printed[2] == pytest.approx(printed[1], rel=1e-5)
