"""torchtitan's own Trainer and Validator on a processor, EMULATED: the losses of a loop without them, in one process and sharded
by FSDP over two, killed and gone on from torchtitan's checkpoint, with the ledger of a job that nothing happened to.

`make test-integrations` runs them in an environment that has torchtitan.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.errors import UserError
from headrace.ledger import ledger_sha256
from tests.frameworks.conftest import needs
from tests.frameworks.library_loops import EVERY, HERE, KILLED_AT, SHAPE, STEPS, Loop, losses

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "integrations" / "torchtitan.md"
LAUNCHER = str(HERE / "torchtitan_on_cpu.py")
VALIDATED = re.compile(r"validate step: +(\d+) +loss: +([\d.]+)")


@pytest.mark.parametrize(("before_the_kill", "behind_it"), [(1, 1), (2, 2), (2, 1)])
def test_it_has_the_losses_of_a_plain_loop_and_goes_on_from_its_own_checkpoint(
    calm: Any, spec: Any, loop: Loop, tmp_path: Path, capsys: Any, before_the_kill: int, behind_it: int
) -> None:
    """Two ranks are sharded by FSDP, one of them loads their checkpoint, too. torchtitan counts steps from 1."""
    needs("torchtitan")
    topology = {"replicas": before_the_kill, "microbatches": 2 // before_the_kill}
    names = (f"torchtitan-{before_the_kill}-{behind_it}-{kind}" for kind in ("killed", "alone"))
    job, alone = (calm.submit(spec(name, topology=topology, **SHAPE)) for name in names)
    expected = losses(loop("plain_torchtitan_loop", alone), tmp_path / f"{alone}.log")
    weights = ["--weights", str(tmp_path / alone)]

    def trained(ranks: int, stop: int | None = None) -> dict[int, float]:
        process = loop("torchtitan_loop", job, LAUNCHER, ranks=ranks, microbatches=2 // ranks, options=weights)
        return losses(process, tmp_path / f"{job}.log", stop)

    before, after = trained(before_the_kill, stop=KILLED_AT), trained(behind_it)
    assert sorted(after) == list(range(KILLED_AT - KILLED_AT % EVERY + 1, STEPS + 1)), "on from the newest checkpoint"
    assert sorted(expected) == list(range(1, STEPS + 1))
    assert before | after == pytest.approx(expected, rel=1e-4)
    assert ledger_sha256(calm.ledger(job)) == ledger_sha256(calm.ledger(alone))
    assert main(["audit", job, "--endpoint", calm.endpoint, "--format", "json"]) == 0, capsys.readouterr().out


def test_its_validator_takes_the_mean_over_a_set_of_the_job_by_the_pages_command(
    calm: Any, spec: Any, loop: Loop, tmp_path: Path
) -> None:
    """Of the last global batch of the set, some microbatches have no sample."""
    needs("torchtitan")
    texts = [json.dumps({"text": f"few number {number} " * (1 + 3 * number % 7)}) for number in range(5)]
    (tmp_path / "few.jsonl").write_text("\n".join(texts))
    sets = {"few": {"sources": [{"path": str(tmp_path / "few.jsonl")}]}}
    topology = {"replicas": 2, "microbatches": 1}
    names = (f"torchtitan-validated-{kind}" for kind in ("two", "alone"))
    job, alone = (calm.submit(spec(name, topology=topology, validation=sets, **SHAPE)) for name in names)
    plain = loop("plain_torchtitan_loop", alone)
    expected = float(re.findall(r"few loss ([\d.]+)", plain.communicate()[0])[-1])
    own = {"--endpoint": calm.endpoint, "--job": job, "--checkpoints": str(tmp_path / job), "--weights": str(tmp_path / alone)}
    [line] = re.findall(r"^`(torchrun --nproc-per-node 2 tests/.*)`", PAGE.read_text(), re.MULTILINE)
    words = shlex.split(line)
    command = [own.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    assert own.keys() <= set(words)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    printed = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": path}, capture_output=True, text=True, timeout=600
    )
    assert printed.returncode == 0, (printed.stdout + printed.stderr)[-4000:]
    assert "EMULATED" in printed.stdout
    validated = {int(step): float(loss) for step, loss in VALIDATED.findall(printed.stdout)}
    assert sorted(validated) == [1, *range(EVERY, STEPS + 1, EVERY)]
    assert validated[STEPS] == pytest.approx(expected, rel=1e-4)
    assert validated[1] - validated[STEPS] > 0.5, "it has learnt meanwhile"
    assert ledger_sha256(calm.ledger(job)) == ledger_sha256(calm.ledger(alone))


@pytest.mark.filterwarnings("ignore")  # torchtitan and what it imports warn of much
def test_a_part_of_a_set_and_a_set_of_no_job_are_refused() -> None:
    needs("torchtitan")
    from dataclasses import replace

    from headrace.trainer.integrations.torchtitan_loader import HeadraceValidationLoader

    config = HeadraceValidationLoader.Config(job="unknown", dataset="few")
    with pytest.raises(UserError, match=r"leave validator.steps at -1"):
        replace(config, infinite=True)
    with pytest.raises(UserError, match=r"job 'unknown' needs a HeadraceDataLoader of that job"):
        config.build(dp_world_size=1, dp_rank=0, tokenizer=None, seq_len=8, local_batch_size=1)
