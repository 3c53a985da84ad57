"""SkyPilot's own parser takes deploy/skypilot/headrace.yaml."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.kubernetes_documents import ROOT

PYTHON = os.environ.get("SKYPILOT_PYTHON", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="SKYPILOT_PYTHON names no Python with SkyPilot")]
GROUP = ROOT / "deploy" / "skypilot" / "headrace.yaml"
READ = """
import sys
from sky.utils import dag_utils
assert dag_utils.is_job_group_yaml(sys.argv[1])
group = dag_utils.load_job_group_from_yaml(sys.argv[1])
group.validate()
print([(task.name, task.num_nodes) for task in group.tasks], group.primary_tasks)
"""


def test_skypilot_reads_the_job_group(tmp_path: Path) -> None:
    catalog = tmp_path / ".sky" / "catalogs" / "v8" / "common" / "accelerators.csv"  # it would be fetched
    catalog.parent.mkdir(parents=True)
    catalog.write_text("AcceleratorName,Clouds\nH100,AWS\n")
    for folder in ("papers/reorder", "papers/client", "papers/preprocessor", "papers/trainer", "tokens"):
        (tmp_path / ".headrace" / folder).mkdir(parents=True)
    for role in ("preprocess", "train"):
        (tmp_path / ".headrace" / "tokens" / role).write_text("token\n")
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    command = [PYTHON, "-c", READ, str(GROUP)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "[('reorder', 1), ('preprocessors', 2), ('trainers', 2)] ['trainers']"
