"""The loops of examples/integrations, as their pages say to start them: 20 steps with the losses of a loop without any library,
killed on their way and gone on from the library's own checkpoint, with the ledger of a job that nothing happened to.

`make test-integrations` runs them in an environment of their own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.ledger import ledger_sha256
from tests.frameworks.conftest import needs
from tests.wire import free_ports

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

HERE, EXAMPLES = Path(__file__).parent, Path(__file__).parents[2] / "examples"
STEPS, EVERY, KILLED_AT = 20, 5, 12
SHAPE = {
    "sources": [{"path": str(EXAMPLES / "data" / "text-00000.tar")}],
    "steps": STEPS,
    "global_batch": 4,
    "text": {"max_tokens": 512},
}
LOSS = re.compile(r"(?:.* )?step:? +(\d+) +loss:? +([\d.]+)")
VALIDATED = re.compile(r"(?:eval_)?(few|more)[_ ]loss (\d+\.\d+)")
Loop = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def loop(calm: Any, tmp_path: Path) -> Loop:
    """(script, job, its launcher) -> the process of a loop that goes on from its newest checkpoint. Two ranks are in one process
    group, and what the first one prints is read."""
    (tmp_path / "torchaudio.py").touch()  # transformers imports it where it finds one, which may be built for another torch

    def start(script: str, job: str, *launcher: str, ranks: int = 1, microbatches: int = 2) -> subprocess.Popen[str]:
        command = [sys.executable, *launcher, str(EXAMPLES / "integrations" / f"{script}.py"), "--endpoint", calm.endpoint]
        command += ["--job", job, "--steps", str(STEPS), "--every", str(EVERY), "--checkpoints", str(tmp_path / job)]
        command += ["--microbatches", str(microbatches)]
        if ranks == 2:
            command = ["sh", "-c", 'RANK=1 LOCAL_RANK=1 "$@" > /dev/null & exec "$@"', "both", *command]
        world = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(ranks),
            "ACCELERATE_USE_CPU": "true",  # which `accelerate launch --cpu` sets, as torchrun sets those below
            "TORCHELASTIC_RUN_ID": job,
            "LOCAL_WORLD_SIZE": str(ranks),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_ports(1)[0]),
        }
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(world if launcher or ranks > 1 else {})}
        with (tmp_path / f"{job}.log").open("a") as errors:
            return subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )

    return start


def losses(process: subprocess.Popen[str], log: Path, stop: int | None = None) -> dict[int, float]:
    """Of the steps that a loop prints; it is killed once it has printed `stop`, with the processes that it has started."""
    found: dict[int, float] = {}
    with process:
        assert process.stdout is not None
        for match in filter(None, map(LOSS.match, process.stdout)):
            found[int(match[1])] = float(match[2])
            if int(match[1]) == stop:
                os.killpg(process.pid, signal.SIGKILL)  # Megatron's savers would keep its output open
    assert process.returncode == 0 or stop is not None, log.read_text()[-4000:]
    return found


@pytest.mark.parametrize(
    ("script", "library", "launcher", "plain"),
    [
        ("huggingface_loop", "accelerate", [], ("plain_loop", [])),
        ("accelerate_loop", "accelerate", [], ("plain_loop", [])),
        ("lightning_loop", "lightning", [], ("plain_loop", [])),
        (
            "megatron_loop",
            "megatron",
            [str(HERE / "megatron_on_cpu.py")],
            ("plain_megatron_loop", [str(HERE / "megatron_on_cpu.py")]),
        ),
    ],
)
def test_a_loop_has_the_losses_of_a_plain_one_and_goes_on_from_its_own_checkpoint(
    calm: Any, spec: Any, loop: Loop, tmp_path: Path, capsys: Any, script: str, library: str, launcher: list[str], plain: Any
) -> None:
    needs(library)
    topology = {"replicas": 1, "microbatches": 2}
    job, alone = (calm.submit(spec(f"{script}-{kind}", topology=topology, **SHAPE)) for kind in ("killed", "alone"))
    expected = losses(loop(plain[0], alone, *plain[1]), tmp_path / f"{alone}.log")
    before = losses(loop(script, job, *launcher), tmp_path / f"{job}.log", stop=KILLED_AT)
    after = losses(loop(script, job, *launcher), tmp_path / f"{job}.log")
    assert sorted(after) == list(range(KILLED_AT - KILLED_AT % EVERY, STEPS)), "on from the newest checkpoint"
    assert expected == pytest.approx(before | after, rel=1e-4)
    assert {step: before[step] for step in before if step in after} == pytest.approx(
        {step: after[step] for step in before if step in after}, rel=1e-5
    )
    assert ledger_sha256(calm.ledger(job)) == ledger_sha256(calm.ledger(alone))
    assert main(["audit", job, "--endpoint", calm.endpoint, "--format", "json"]) == 0, capsys.readouterr().out


def test_torchtitan_goes_on_from_its_own_checkpoint(calm: Any, spec: Any, loop: Loop, tmp_path: Path, capsys: Any) -> None:
    """As if it had not been killed: it has a model and an optimizer of its own, and counts steps from 1."""
    needs("torchtitan", "pip install torchtitan triton")
    topology = {"replicas": 1, "microbatches": 2}
    job, alone = (calm.submit(spec(f"torchtitan-{kind}", topology=topology, **SHAPE)) for kind in ("killed", "alone"))
    launcher = str(HERE / "torchtitan_on_cpu.py")
    expected = losses(loop("torchtitan_loop", alone, launcher), tmp_path / f"{alone}.log")
    before = losses(loop("torchtitan_loop", job, launcher), tmp_path / f"{job}.log", stop=KILLED_AT)
    after = losses(loop("torchtitan_loop", job, launcher), tmp_path / f"{job}.log")
    assert sorted(after) == list(range(KILLED_AT - KILLED_AT % EVERY + 1, STEPS + 1)), "on from the newest checkpoint"
    assert expected == pytest.approx(before | after, rel=1e-4)
    assert ledger_sha256(calm.ledger(job)) == ledger_sha256(calm.ledger(alone))
    assert main(["audit", job, "--endpoint", calm.endpoint, "--format", "json"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("script", ["huggingface_loop", "accelerate_loop", "lightning_loop"])
def test_two_ranks_have_the_losses_of_one_and_one_goes_on_from_their_checkpoint(
    calm: Any, spec: Any, loop: Loop, tmp_path: Path, capsys: Any, script: str
) -> None:
    """Gradients are averaged by the library's own data parallelism."""
    needs("accelerate")
    topology = {"replicas": 2, "microbatches": 1}
    job, alone = (calm.submit(spec(f"{script}-{kind}-{STEPS}", topology=topology, **SHAPE)) for kind in ("two", "one"))
    expected = losses(loop("plain_loop", alone), tmp_path / f"{alone}.log")
    before = losses(loop(script, job, ranks=2, microbatches=1), tmp_path / f"{job}.log", stop=KILLED_AT)
    after = losses(loop(script, job), tmp_path / f"{job}.log")
    assert sorted(after) == list(range(KILLED_AT - KILLED_AT % EVERY, STEPS)), "on from the newest checkpoint"
    assert expected == pytest.approx(before | after, rel=1e-4)
    assert ledger_sha256(calm.ledger(job)) == ledger_sha256(calm.ledger(alone))
    assert main(["audit", job, "--endpoint", calm.endpoint, "--format", "json"]) == 0, capsys.readouterr().out


def test_two_ranks_evaluate_the_sets_of_a_job_as_one_does(calm: Any, spec: Any, loop: Loop, tmp_path: Path) -> None:
    """Behind the last step, as the pages say. Of the last global batch of a set, some microbatches have no sample."""
    needs("accelerate")
    for name, size in {"few": 5, "more": 10}.items():
        texts = [json.dumps({"text": f"{name} number {number} " * (1 + number % 4)}) for number in range(size)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(texts))
    sets = {name: {"sources": [{"path": str(tmp_path / f"{name}.jsonl")}]} for name in ("few", "more")}

    def evaluated(script: str, ranks: int) -> dict[str, float]:
        topology = {"replicas": ranks, "microbatches": 2 // ranks}
        job = calm.submit(spec(f"{script}-sets", topology=topology, validation=sets, **SHAPE))
        output, _ = loop(script, job, ranks=ranks, microbatches=2 // ranks).communicate()
        found = {name: float(loss) for name, loss in VALIDATED.findall(output)}
        assert found, (tmp_path / f"{job}.log").read_text()[-4000:]
        return found

    expected = evaluated("plain_loop", ranks=1)
    assert expected.keys() == sets.keys()
    for script in ("huggingface_loop", "accelerate_loop", "lightning_loop"):
        assert evaluated(script, ranks=2) == pytest.approx(expected, rel=1e-4), script
