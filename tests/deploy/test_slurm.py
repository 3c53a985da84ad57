"""deploy/slurm/headrace.sbatch on a real Slurm, with several nodes that are this machine."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.slurm_cluster import SlurmCluster, await_that, lacking, running_slurm
from tests.kubernetes_documents import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(lacking()), reason=f"no Slurm here: {lacking()}"),
]
SCRIPT = ROOT / "deploy" / "slurm" / "headrace.sbatch"
END_S = 900.0
JOB = """
name: demo
sources: [{path: DATA}]
global_batch: 32
topology: {replicas: 2, microbatches: 2}
image: {max_pixels: 50176}
model: tiny
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with running_slurm(tmp_path_factory.mktemp("slurm"), num_nodes=5) as running:
        yield running


class Run:
    """The script, submitted with the needs of its parts made small."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        text = re.sub(r"--cpus-per-task=\d+ --mem=\d+G( --gpus-per-node=\d+)?", "--cpus-per-task=1", SCRIPT.read_text())
        (folder / "headrace.sbatch").write_text(text)
        data = ROOT / "examples" / "data"
        (folder / "job.yaml").write_text(JOB.replace("DATA", str(data)))
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {"PATH": path, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        env |= {"HEADRACE_DATA": str(data), "HEADRACE_TRAIN": "--device cpu --fresh-weights"}
        command = ("sbatch", "--parsable", "headrace.sbatch", "job.yaml")
        self.job = cluster(*command, cwd=folder, **env).partition(";")[0]
        self.own = folder / f"headrace-{self.job}"

    @property
    def log(self) -> str:
        path = self.folder / f"headrace-{self.job}.log"
        return path.read_text() if path.exists() else ""

    def await_in_log(self, words: str) -> None:
        await_that(lambda: words in self.log or self.ended, words, END_S)
        assert words in self.log, self.log[-6000:]

    @property
    def ended(self) -> bool:
        return self.cluster.state_of(self.job) in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def test_a_job_is_trained_and_audited_and_leaves_no_secret(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path)
    await_that(lambda: (run.own / "tokens" / "watch").exists(), "tokens", END_S)
    assert run.own.stat().st_mode & 0o077 == 0
    await_that(lambda: run.ended, "the job's end", END_S)
    assert cluster.state_of(run.job) == "COMPLETED", run.log[-6000:]
    assert "quarantine" in run.log
    assert "left preprocessor" in run.log
    assert "Killed" not in run.log
    assert sorted(path.name for path in run.own.iterdir()) == ["store"]


def test_a_job_whose_time_is_over_goes_back_into_the_queue_and_goes_on(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path)
    run.await_in_log("committed job=demo step=1 ")
    cluster("scancel", "--batch", "--signal=USR1", run.job)
    run.await_in_log("the job goes back into the queue")
    await_that(lambda: cluster.state_of(run.job) == "PENDING", "in the queue again", END_S)
    assert not (run.own / "papers").exists()
    await_that(lambda: run.ended, "the job's second run", END_S)  # Slurm holds it back for two minutes
    assert cluster.state_of(run.job) == "COMPLETED", run.log[-6000:]
    assert run.log.count("submitted job=demo") == 1
    assert run.log.count("quarantine") >= 1
    assert sorted(path.name for path in run.own.iterdir()) == ["store"]


def test_a_cancelled_job_leaves_no_secret(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path)
    run.await_in_log("committed job=demo step=0 ")
    cluster("scancel", run.job)
    await_that(lambda: not (run.own / "tokens").exists() and not (run.own / "papers").exists(), "no secret", END_S)
    assert run.ended or cluster.state_of(run.job) == "COMPLETING"
