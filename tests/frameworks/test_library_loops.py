"""The loops of examples/integrations, as their pages say to start them: 20 steps with the losses of a loop without any library,
killed on their way and gone on from the library's own checkpoint, with the ledger of a job that nothing happened to.

`make test-integrations` runs them in an environment of their own.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.ledger import ledger_sha256
from tests.frameworks.conftest import needs
from tests.frameworks.library_loops import EVERY, HERE, KILLED_AT, SHAPE, STEPS, Loop, losses

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

VALIDATED = re.compile(r"(?:eval_)?(few|more)[_ ]loss (\d+\.\d+)")


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
