"""`headrace train --emulate`: real processes and messages under a planned step, with sleeps for computing."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import matplotlib.image
import pytest

from headrace.cli.main import EXIT_USER_ERROR, main
from headrace.schedule import Kind, build

STEPS, MICROBATCHES, STAGES = 2, 4, {"encoder": 1, "llm": 2}
PIPELINE = ["--replicas", "1", "--microbatches", str(MICROBATCHES), "--encoder-stages", "1", "--llm-stages", "2"]


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    path = tmp_path / "costs.jsonl"
    rows = [{"sample_id": i, "cost_encoder": 1 + i % 3, "cost_llm": 2 + i % 5} for i in range(16)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("name", ["1f1b", "zero-bubble"])
def test_every_stage_takes_its_schedule_and_times_are_marked_as_emulated(
    name: str, costs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "steps.png"
    arguments = ["train", "--emulate", str(costs), *PIPELINE, "--batch", "8", "--steps", str(STEPS), "--strategy", "entrain"]
    arguments += ["--schedule", name]
    assert main([*arguments, "--time-scale", "0.0005", "--trace", str(trace), "--out", str(picture)]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == STEPS + 2
    assert [line for line in lines if not line.startswith("EMULATED")] == []

    document = json.loads(trace.read_text())
    names = {(e["pid"], e["tid"], e["name"]): e["args"].get("name") for e in document["traceEvents"] if e["ph"] == "M"}
    taken = defaultdict(list)
    for event in sorted((e for e in document["traceEvents"] if e["ph"] == "X"), key=lambda event: event["ts"]):
        place = names[event["pid"], 0, "process_name"], names[event["pid"], event["tid"], "thread_name"]
        taken[place].append(event["name"])
    schedule = build(name, STAGES, range(MICROBATCHES))
    expected = [[f"{'FBW'[action.kind]} {action.microbatch}" for action in stage] * STEPS for stage in schedule]
    encoder, llm = "EMULATED encoder, replica 0", "EMULATED llm, replica 0"
    assert dict(taken) == dict(zip([(encoder, "stage 0"), (llm, "stage 0"), (llm, "stage 1")], expected, strict=True))
    assert (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT) == (0, 1, 2), "as 'FBW' has them"
    assert matplotlib.image.imread(picture).shape[1] > 1000


@pytest.mark.slow
@pytest.mark.integration
def test_a_unit_with_replicas_of_its_own_has_a_process_for_each(costs: Path, tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "steps.png"
    arguments = ["train", "--emulate", str(costs), *PIPELINE, "--dp", "encoder=2", "--strategy", "joint"]
    assert main([*arguments, "--time-scale", "0.0005", "--trace", str(trace), "--out", str(picture)]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    assert names == {"EMULATED encoder, replica 0", "EMULATED encoder, replica 1", "EMULATED llm, replica 0"}
    assert picture.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--latency", "0.1"], "--latency and --bandwidth do not go with --emulate"),
        (["--whole-backward"], "--whole-backward does not go with --emulate"),
        (["--time-scale", "0"], "--time-scale must be positive and finite, got 0.0"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--batch", "17"], "--global-batch must be from 1 to the 16 rows"),
        (["--strategy", "fastest"], "no strategy 'fastest'"),
    ],
)
def test_what_cannot_be_emulated_is_said(
    costs: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--emulate", str(costs), *options]) == EXIT_USER_ERROR
    assert message in capsys.readouterr().err


def test_options_of_an_emulation_are_refused_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--job", "x", "--schedule", "eager"]) == EXIT_USER_ERROR
    assert "--schedule goes with --emulate COSTS only" in capsys.readouterr().err


@pytest.mark.integration
@pytest.mark.parametrize("sharing", ["nested", pytest.param("colocated", marks=pytest.mark.slow)])
def test_ranks_that_units_share_take_turns_and_are_forecast(
    sharing: str, costs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "step.png"
    arguments = ["train", "--emulate", str(costs), *PIPELINE, "--dp", "encoder=2", "--on-llm", "encoder", "--sharing", sharing]
    arguments += ["--pieces", "encoder=2"] if sharing == "colocated" else []
    arguments += ["--crossing", "--strategy", "entrain", "--batch", "8", "--steps", "1", "--time-scale", "0.002"]
    assert main([*arguments, "--trace", str(trace), "--out", str(picture), "--format", "json"]) == 0
    assert matplotlib.image.imread(picture).shape[1] > 1000
    [step] = json.loads(capsys.readouterr().out)["steps"]
    assert step["measured_s"] >= 0.99 * step["predicted_s"] > 0
    document = json.loads(trace.read_text())
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"}
    assert sorted(names.values()) == ["EMULATED encoder, replica 0", "EMULATED encoder, replica 1", "EMULATED llm, replica 0"]
