"""The script that `headrace orchestrate` writes for Slurm trains its placement on a real one, whose nodes are this machine."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from headrace.cli.example import example_data
from headrace.cli.main import main
from tests.deploy.slurm_cluster import await_that, lacking, running_slurm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(lacking()), reason=f"no Slurm here: {lacking()}"),
]
END_S = 900.0
MACHINE = {
    "nodes": 2,
    "gpus_per_node": 2,
    "memory_gib": 2,
    "flops_per_s": 20e9,
    "intra_node_bytes_per_s": 1e9,
    "inter_node_bytes_per_s": 1e9,
}


def test_a_placement_is_trained_with_the_processes_of_its_nodes(tmp_path: Path) -> None:
    (tmp_path / "machine.yaml").write_text(yaml.safe_dump(MACHINE))
    out = tmp_path / "plan"
    data = ["--data", str(example_data() / "charts-*.tar"), "--max-pixels", "50176", "--global-batch", "16", "--batches", "1"]
    where = ["--cluster", str(tmp_path / "machine.yaml"), "--out", str(out), "--placements", "disaggregated"]
    assert main(["orchestrate", "--model", "tiny", *data, *where, "--searches", "megatron"]) == 0
    processes = json.loads((out / "placement.json").read_text())["processes"]
    script = out / "headrace.sbatch"
    text = re.sub(r"--cpus-per-task=\d+ --mem=\d+G( --gpus-per-node=\d+)?", "--cpus-per-task=1", script.read_text())
    script.write_text(text.replace("--nodes=2 --ntasks-per-node=1", "--nodes=1 --ntasks-per-node=1", 1))  # of preprocessors
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {"PATH": path, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    env |= {"HEADRACE_DATA": str(example_data()), "HEADRACE_TRAIN": "--device cpu"}
    (tmp_path / "slurm").mkdir()
    with running_slurm(tmp_path / "slurm", num_nodes=4) as cluster:
        job = cluster("sbatch", "--parsable", str(script), str(out / "job-execution.yaml"), cwd=tmp_path, **env).partition(";")[0]
        await_that(lambda: cluster.state_of(job) in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL"), "the job's end", END_S)
        log = (tmp_path / f"headrace-{job}.log").read_text()
        assert cluster.state_of(job) == "COMPLETED", log[-6000:]
    assert len(set(re.findall(r'memory forecast place="([^"]*)"', log))) == processes
    assert "committed job=orchestrated step=6 " in log
