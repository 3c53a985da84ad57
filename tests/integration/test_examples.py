"""The training loops of `examples/` as a user starts them, on a real cluster."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ONE_MICROBATCH = {"replicas": 1, "microbatches": 1}
THREE_REPLICAS = {"replicas": 3, "microbatches": 2}  # of two ranks one has four microbatches, the other two; some hold no sample


@pytest.fixture
def losses(calm, spec, tmp_path: Path):
    """Run an example to the end of a job of three steps; the losses that it prints.

    Nothing of torchaudio is in its way: the one that the preprocessors beside it use may be built for another torch.
    """
    (tmp_path / "torchaudio.py").touch()

    def run(script: str, topology: dict[str, int], launcher: list[str]) -> list[float]:
        job = calm.submit(spec(f"{Path(script).stem}-{topology['replicas']}", steps=3, global_batch=4, topology=topology))
        command = [sys.executable, *launcher, str(EXAMPLES / script), "--endpoint", calm.endpoint, "--job", job]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        assert len(calm.ledger(job)) == 3
        lines = [line.split() for line in done.stdout.splitlines()]
        assert [line[:3] for line in lines] == [["step", str(step), "loss"] for step in range(3)]
        return [float(line[3]) for line in lines]

    return run


@pytest.mark.slow
def test_sharded_over_two_ranks_of_unequal_share_the_losses_are_those_of_one_rank_and_one_microbatch(losses) -> None:
    """From the second step on they depend on the gradient: its scale, and that no sample sees another of its microbatch."""
    alone = losses("plain_loop.py", ONE_MICROBATCH, [])
    sharded = losses("fsdp_loop.py", THREE_REPLICAS, TORCHRUN)
    assert sharded == pytest.approx(alone, rel=1e-5)
    assert alone[0] == pytest.approx(math.log(4096), rel=0.1)  # of a fresh model, over the bundled tokenizer's tokens


@pytest.mark.slow
def test_the_losses_of_a_hugging_face_model_do_not_depend_on_how_samples_are_packed(losses) -> None:
    alone = losses("huggingface_loop.py", ONE_MICROBATCH, [])
    packed = losses("huggingface_loop.py", THREE_REPLICAS, [])
    assert packed == pytest.approx(alone, rel=1e-5)
    assert all(map(math.isfinite, alone))
