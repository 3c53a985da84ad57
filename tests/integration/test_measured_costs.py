"""From a profile of this machine to a live job that is planned with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from headrace import trainer
from headrace.cli.main import main
from headrace.ledger import ledger_sha256
from headrace.trainer.profiling import profiled_batch

pytestmark = pytest.mark.integration


def test_a_profile_goes_into_a_job_whose_samples_stay_the_same(
    calm, spec, undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profiled_batch, "PACKED_POSITIONS", 64)
    file = tmp_path / "tiny.json"
    sizes = ["--tokens", "16,32,64", "--repeats", "3", "--seconds", "0", "--vocab", "64", "--threads", "1"]
    assert main(["profile", "tiny", *sizes, "--out", str(file)]) == 0
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(json.loads(spec("measured", steps=3).to_json())))
    submit = ["job", "submit", str(job), "--endpoint", calm.endpoint, "--coefficients"]
    assert main([*submit, str(file)]) == 0
    with trainer.connect(calm.endpoint, job="measured") as loader:
        assert loader.spec.execution.coefficients is not None
        assert loader.spec.execution.coefficients["model"] == "tiny"
        for step in loader:
            assert list(step)
            loader.commit(step)
    assert ledger_sha256(calm.ledger("measured")) == undisturbed(3)

    document = json.loads(file.read_text())
    document["units"]["llm"]["layers"] = 28
    file.write_text(json.dumps(document))
    job.write_text(job.read_text().replace("name: measured", "name: of-another-model"))
    capsys.readouterr()
    assert main([*submit, str(file)]) == 2
    sentence = "execution.coefficients: the coefficients are of model 'tiny' and have 28 layers of llm, but model 'tiny' has 4"
    assert sentence in capsys.readouterr().err
