"""The autoscalers' query, computed by Prometheus' own tool from series of preprocessors and trainers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kubernetes_documents import DEPLOYMENTS
from tests.kustomization import documents_of

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")]
DECODING = 'headrace_preprocessor_stage_parts{stage="decode",pod="%s"}'
READ = 'headrace_preprocessor_stage_parts{stage="read",pod="%s"}'
WAIT = 'headrace_trainer_data_wait_seconds_sum{pod="%s"}'


@pytest.mark.parametrize(
    ("series", "needed"),
    [
        # two preprocessors with four threads each, all busy; two trainers that wait half of each quarter of a minute
        (
            {DECODING % "a": "4x40", DECODING % "b": "4x40", READ % "b": "9x40", WAIT % "c": "0+7.5x40", WAIT % "d": "0+7.5x40"},
            [4.8],
        ),
        ({DECODING % "a": "4x40", WAIT % "c": "0+15x40"}, [4.8]),  # waits all the time: four times as many, and a fifth
        ({DECODING % "a": "2x40", WAIT % "c": "0+0x40"}, [0.6]),
        ({DECODING % "a": "2x40"}, []),  # nobody trains
    ],
    ids=["half", "always", "never", "no trainer"],
)
def test_it_is_the_number_that_would_do(series: dict[str, str], needed: list[float], tmp_path: Path) -> None:
    (scaled,) = documents_of(DEPLOYMENTS / "overlays" / "keda" / "scaledobject.yaml")
    rule = {"record": "needed", "expr": scaled["spec"]["triggers"][0]["metadata"]["query"]}
    expected: list[dict[str, Any]] = [{"labels": "needed", "value": number} for number in needed]
    case = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": "needed", "eval_time": "5m", "exp_samples": expected}],
    }
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "deploy", "rules": [rule]}]}))
    settings = {"rule_files": ["rules.yaml"], "evaluation_interval": "15s", "tests": [case]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(settings))
    command = ["promtool", "test", "rules", "test.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
