"""The files of a placement on this machine's cores train what was placed, started by the script among them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from headrace.cli.example import example_data
from headrace.cli.main import main
from headrace.jobs_client import state_name
from tests.integration.conftest import Cluster
from tests.wire import free_ports

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]
MACHINE = {
    "nodes": 1,
    "gpus_per_node": 2,
    "memory_gib": 2,
    "flops_per_s": 20e9,
    "intra_node_bytes_per_s": 1e9,
    "inter_node_bytes_per_s": 1e9,
}
COSTS = {
    "model": "tiny",
    "measured_on": {"dtype": "fp32"},
    "units": {
        "vision": {"layers": 2, "quadratic_s": 1.6e-9, "linear_s": 2.9e-6},
        "llm": {"layers": 4, "quadratic_s": 1.8e-9, "linear_s": 3.4e-5},
    },
}


def test_a_placement_on_two_cores_is_trained_by_its_own_script(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "machine.yaml").write_text(yaml.safe_dump(MACHINE))
    (tmp_path / "costs.json").write_text(json.dumps(COSTS))
    out = tmp_path / "plan"
    where = ["--cluster", str(tmp_path / "machine.yaml"), "--coefficients", str(tmp_path / "costs.json"), "--out", str(out)]
    data = ["--data", str(example_data() / "charts-*.tar"), "--max-pixels", "50176", "--global-batch", "16", "--batches", "2"]
    assert main(["orchestrate", "--model", "tiny", *data, *where, "--placements", "disaggregated"]) == 0
    placement = json.loads((out / "placement.json").read_text())
    assert placement["processes"] == 2
    cluster.start_reorder()
    cluster.add_preprocessors(1)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PATH": path,
        "ENDPOINT": cluster.endpoint,
        "MASTER_PORT": str(free_ports(1)[0]),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    words = ["bash", str(out / "torchrun.sh"), "--threads", "1", "--device", "cpu"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with cluster.client() as client:
        assert state_name(client.show("orchestrated")) == "done"
        assert client.spec("orchestrated").topology.microbatches == placement["searches"][0]["microbatches"]
    assert cluster.reorder is not None
    steps = re.findall(r"committed job=orchestrated step=\d+ .*measured_s=", cluster.reorder.log.read_text())
    assert len(steps) == 7, "an epoch of 101 samples"
