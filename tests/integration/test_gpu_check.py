"""`make gpu-check` on the CPU: every check runs, and leaves the figures of GPUs alone.

In this process, where its services and trainers are forks: that each check has a process of its own is told by the tests of
`isolated_check`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as gpu_check
from benchmarks.gpu.isolated_check import Check
from benchmarks.gpu.target import EMULATED, Target
from benchmarks.report import RESULTS, Section

pytestmark = pytest.mark.integration

CPU = Target(device_type="cpu", num_gpus=0)
COMPILED = "torch.compile of a block over microbatches of other lengths"


class InThisProcess:
    """Runs checks one after the other; one that raises fails the test."""

    def run(self, check: Check, target: Target) -> Section:
        return Section(title=target.title(check.title), rows=list(check.measure(target)))


@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("default")
def test_the_cpu_form_runs_every_check_and_leaves_the_gpus_figures_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_gpus = RESULTS / "gpu.json"
    before = of_gpus.read_bytes() if of_gpus.exists() else None
    monkeypatch.setattr(gpu_check, "CheckProcesses", InThisProcess)
    assert gpu_check.main(["--results", str(tmp_path), "--cpu"]) == 0, capsys.readouterr().out
    assert (of_gpus.read_bytes() if of_gpus.exists() else None) == before
    assert EMULATED in capsys.readouterr().out
    (path,) = tmp_path.iterdir()
    report = json.loads(path.read_text())
    assert path.name == "gpu-emulated.json"
    assert EMULATED.removesuffix(":") in report["machine"]["device"]
    assert {row["section"] for row in report["rows"]} == {CPU.title(check.title) for check in gpu_check.CHECKS} | {
        "The whole run"
    }
    assert [row for row in report["rows"] if row["ok"] is False] == []
    [compiled] = [row for row in report["rows"] if row["section"] == CPU.title(COMPILED)]
    assert compiled["value"] <= 1, "it is compiled anew once, and not for every microbatch"
