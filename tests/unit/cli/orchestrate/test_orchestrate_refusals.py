"""What `headrace orchestrate` refuses, each in one sentence that says what to do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from headrace.cli.main import main

EXAMPLE = str(Path(__file__).parents[4] / "examples" / "data")
OF_CLUSTER = ["--gpus", "8", "--device", "a40", "--batches", "2", "--limit", "64"]
PIPELINES = [*OF_CLUSTER, "--global-batch", "16", "--allow-small-batch"]
MODEL = "qwen2.5-vl-3b"


def refusal(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["orchestrate", *options]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("headrace orchestrate: ")
    return error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpus", "8", "--device", "b300"], "no device 'b300'; there are a40, a100"),
        (["--gpus", "8"], "say what the GPUs are"),
        (["--device", "a40"], "--gpus says how many there are, and is missing"),
        (["--gpus", "10", "--device", "a40"], "10 GPUs are no whole number of nodes of 4: take 8 or 12"),
        (["--gpus", "0", "--device", "a40"], "--gpus must be from 1 to 16,384, got 0"),
        (["--gpus", "20000", "--device", "a40"], "--gpus must be from 1 to 16,384, got 20000"),
        (["--cluster", "nowhere.yaml"], "cannot read the cluster nowhere.yaml: No such file or directory"),
        (["--gpus", "8", "--device", "a40", "--model", "gpt-9"], "no model 'gpt-9'; there are tiny"),
        (["--gpus", "8", "--device", "a40", "--searches", "luck"], "no search 'luck'; there are megatron"),
        (["--gpus", "8", "--device", "a40", "--placements", "luck"], "--placements takes all or some of disaggregated, "),
        (["--gpus", "8", "--device", "a40", "--strategy", "luck"], "no strategy 'luck'"),
        (["--gpus", "8", "--device", "a40", "--schedule", "luck"], "no schedule 'luck'"),
        (["--gpus", "8", "--device", "a40", "--chunks", "2"], "--chunks 2 needs --schedule interleaved"),
        (["--gpus", "8", "--device", "a40", "--batches", "0"], "--batches must be at least 1, got 0"),
        (["--gpus", "8", "--device", "a40", "--global-batch", "0"], "--global-batch must be from 1"),
    ],
)
def test_what_cannot_be_asked_is_told_before_data_are_read(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [] if "--model" in options else ["--model", MODEL]
    assert words in refusal(capsys, *model, "--data", "/no/such/folder", *options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--frozen", "audio"], "--frozen names 'audio', which is no unit of the pipeline (vision, llm)"),
        (["--tp", "audio=1"], "--tp names each of vision, llm once at most, got 'audio=1'"),
        (["--tp", "llm=2:4"], "--tp llm=2:4: a node, the heads and the channels of llm allow 1:2"),
        (["--tp", "8"], "--tp vision=8: a node, the heads and the channels of vision allow 1:2:4"),
        (["--dp", "llm=1:9"], "--dp llm=1:9: the GPUs and the samples of a step of llm allow 1 to 8"),
        (["--pp", "vision=33"], "--pp vision=33: the layers of vision allow 1 to 32"),
        (["--pp", "vision=two"], "--pp vision=two: the layers of vision allow 1 to 32"),
        (
            ["--dp", "1", "--placements", "colocated", "--tp", "llm=2"],
            "8 GPUs are too few for vision, llm with the dp, tp and pp",
        ),
        (["--model", "mllm-72b", "--gpus", "4"], "GiB more than the 44.2 GiB that a GPU may use"),
    ],
)
def test_what_does_not_fit_the_data_or_the_cluster_is_told(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", MODEL, "--data", EXAMPLE, *PIPELINES, "--limit", "32", "--batches", "1", "--out", str(tmp_path)]
    assert words in refusal(capsys, *given, "--searches", "megatron", *options)


def test_a_global_batch_below_b_min_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", MODEL, "--data", EXAMPLE, *OF_CLUSTER, "--out", str(tmp_path), "--global-batch", "4"]
    words = refusal(capsys, *options)
    found = re.search(r"the global batch of 4 samples is below (\d+), .* \(Entrain's b_min\)", words)
    assert found, words
    assert (
        f"take --global-batch {found[1]}, leave disaggregated out of --placements, or accept it with --allow-small-batch" in words
    )
    assert not list(tmp_path.iterdir())


def test_no_data_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = refusal(capsys, "--model", MODEL, *PIPELINES)
    assert "say what the model is to be trained on: --data PATH, or the sources of a job, --spec JOB.yaml" in words


def test_a_data_set_without_a_sample_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    words = refusal(capsys, "--model", MODEL, "--data", str(tmp_path / "empty.jsonl"), *PIPELINES)
    assert "holds no good sample" in words


def test_text_alone_leaves_nothing_to_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "One sentence."}) + "\n")
    words = refusal(capsys, "--model", MODEL, "--data", str(tmp_path / "text.jsonl"), *PIPELINES)
    assert "there is one unit only and nothing to place" in words


def test_costs_that_fall_with_size_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layer = {"positions": [64, 256, 1024], "seconds": [0.1, 0.3, 0.2]}
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"units": {"llm": {"layers": [layer]}}}))
    words = refusal(capsys, "--model", MODEL, "--data", EXAMPLE, *PIPELINES, "--coefficients", str(file))
    assert "units.llm.layers[0] takes 0.2 s on 1024 positions and 0.3 s on 256: costs that fall with size" in words
    file.write_text(json.dumps({"units": {"brain": {"layers": 2, "linear_s": 1e-6}}}))
    assert "there is no unit 'brain'" in refusal(
        capsys, "--model", MODEL, "--data", EXAMPLE, *PIPELINES, "--coefficients", str(file)
    )
