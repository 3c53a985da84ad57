"""`headrace bench services` runs the services of a job and says what they take of the cores, as a cluster file has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from headrace.cli.bench import bench_services
from headrace.cli.example import example_data
from headrace.cli.main import main
from headrace.reorder_service.planning.orchestration.cluster import cluster_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


def test_services_take_core_seconds_for_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("SKIPPED_STEPS", 2), ("SETTLING_S", 0.5), ("RESTING_S", 2.0)):
        monkeypatch.setattr(bench_services, name, value)
    job = {
        "name": "charts",
        "sources": [{"path": str(example_data() / "charts-*.tar")}],
        "global_batch": 8,
        "steps": 1,
        "topology": {"replicas": 1, "microbatches": 4, "stages": {"vision": 1, "llm": 1}},
        "image": {"max_pixels": 50_176},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")
    assert main(["bench", "services", "--spec", str(tmp_path / "job.yaml"), "--steps", "12", "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["steps"], report["samples"]) == (12, 96), "however many steps the job has"
    assert (
        set(report["sample_s"]) == {"reorder service", "preprocessor", "loading in the trainers"} == set(report["resting_cores"])
    )
    assert 1e-4 < report["sample_s"]["preprocessor"] < 1.0, "images are decoded and scaled"
    assert report["cluster"]["service_s_per_sample"] == pytest.approx(sum(report["sample_s"].values()), rel=0.01)
    cluster = cluster_of({"preset": "a40", "cores_per_node": 4, **report["cluster"]}, "machine.yaml")
    assert cluster.service_s_per_sample == report["cluster"]["service_s_per_sample"]
