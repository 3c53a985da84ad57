"""`headrace profile`: coefficients of a model from times of its layers, the fit, the file, and what a plan makes of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.costs.cost_table import read_cost_table
from headrace.cli.costs.profile_fit import FittedKind, part_costs, profile_document, worst, worst_of_units
from headrace.cli.main import main
from headrace.errors import UserError
from headrace.model_shape import MODEL_SHAPES
from headrace.reorder_service.planning.cost_model.coefficients import LayerCost
from headrace.reorder_service.planning.cost_model.coefficients_document import parse_coefficients
from headrace.trainer.profiling import profiled_batch
from headrace.trainer.profiling.layer_times import KindTimes, LayerTimer

POSITIONS = (64.0, 256.0, 1024.0)
COUNTS = ["--tokens", "16,32,64", "--repeats", "3", "--seconds", "0", "--threads", "1", "--vocab", "64"]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiled_batch, "PACKED_POSITIONS", 64)


def kind(
    cost: LayerCost, layers: tuple[int, ...] = (), *, name: str = "layer", tp: int = 1, noise: float = 1.0, backward: float = 1.0
) -> FittedKind:
    """A kind whose layers take what the polynomial says, the middle one times `noise`; its backward takes 1.5 and 0.5 of that,
    times `backward`."""
    forward = [cost.seconds(x) for x in POSITIONS]
    forward[1] *= noise
    return FittedKind.of(
        KindTimes(
            part="llm",
            name=name,
            layers=layers,
            tp=tp,
            positions=POSITIONS,
            forward_s=tuple(forward),
            input_gradients_s=tuple(1.5 * backward * seconds for seconds in forward),
            weight_gradients_s=tuple(0.5 * backward * seconds for seconds in forward),
            rerun_s=tuple(seconds * bool(layers) for seconds in forward),
        )
    )


# -- the fit -----------------------------------------------------------------------------------------------------------


def test_the_layers_of_a_part_stand_in_order_whatever_their_kinds() -> None:
    first, other = LayerCost(linear=1.0), LayerCost(linear=2.0)
    costs = part_costs([kind(other, (1, 3), name="layer 2"), kind(first, (0, 2)), kind(LayerCost(linear=5.0), name="head")])
    assert [round(layer.linear, 9) for layer in costs.layers] == [1, 2, 1, 2]
    assert list(costs.ends) == ["targets"]


def test_the_head_is_a_cost_of_targets_which_comes_to_its_time_with_the_backward_of_the_layers() -> None:
    costs = part_costs([kind(LayerCost(linear=1.0), (0, 1)), kind(LayerCost(linear=5.0), name="head", backward=0.1)])
    whole = 1 + costs.backward.input_gradients + costs.backward.weight_gradients
    assert whole == pytest.approx(3.0), "of the layers alone: the head's gradients come with its loss"
    assert costs.ends["targets"].seconds(100) * whole == pytest.approx(500 * (1 + 0.1 * 2.0))


def test_the_times_of_the_backward_are_those_of_layers_and_ends_together() -> None:
    costs = part_costs([kind(LayerCost(linear=1.0), (0, 1, 2)), kind(LayerCost(linear=1.0), name="embedding")])
    assert costs.backward.input_gradients == pytest.approx(1.5)
    assert costs.backward.weight_gradients == pytest.approx(0.5)
    assert costs.backward.rerun == pytest.approx(0.75), "the end, a quarter of the forward, is not run again"


def test_the_error_of_the_fit_weighs_less_for_a_unit_of_which_the_kind_is_a_small_part() -> None:
    exact, off = kind(LayerCost(linear=1.0), (0, 1, 2)), kind(LayerCost(linear=0.1), name="embedding", noise=1.5)
    assert worst([exact]) == pytest.approx(0, abs=1e-9)
    assert worst([exact, off]) > 0.1
    assert worst_of_units([exact, off]) < 0.02


def test_each_further_width_is_a_slice_of_the_same_unit() -> None:
    kinds = [
        kind(LayerCost(linear=4.0), (0, 1)),
        kind(LayerCost(linear=2.5), (0, 1), tp=2),
        kind(LayerCost(linear=1.0), name="head"),
    ]
    document = json.loads(json.dumps(profile_document({"model": "m"}, kinds, (1, 2))))
    whole, halves = (parse_coefficients(document, {"llm": tp}).parts["llm"] for tp in (1, 2))
    assert whole.forward.linear == pytest.approx(4 + 4 + 1)
    assert halves.forward.linear == pytest.approx(2.5 + 2.5 + 1), "the head is whole on every slice"


def test_fewer_than_three_different_lengths_are_no_curve() -> None:
    with pytest.raises(UserError, match="llm layer: a curve of 3 coefficients needs as many different positions"):
        FittedKind.of(KindTimes(part="llm", name="layer", layers=(0,), tp=1, positions=(1.0, 1.0, 2.0), forward_s=(1.0, 1.0, 1.0),
                                input_gradients_s=(), weight_gradients_s=(), rerun_s=()))  # fmt: skip


# -- the command -------------------------------------------------------------------------------------------------------


def profile(tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the command; return its report and the file."""
    out = tmp_path / "coefficients.json"
    assert main(["profile", *options, *COUNTS, "--out", str(out), "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out), json.loads(out.read_text())


@pytest.mark.slow
def test_a_real_model_is_measured_whole_and_costs_can_be_made_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, document = profile(tmp_path, capsys, "tiny-generator", "--check", "--tp", "1,2")
    measured = parse_coefficients(document)
    measured.check_model("tiny-generator", MODEL_SHAPES["tiny-generator"], ("vision", "audio", "llm", "generator"))
    assert {unit: [*costs.ends] for unit, costs in measured.parts.items()} == {
        "vision": ["embedding", "projector"],
        "audio": ["embedding", "projector"],
        "llm": ["embedding", "targets"],
        "generator": ["projector", "embedding", "head"],
    }
    assert all(costs.forward.seconds(64) > 0 and costs.backward.input_gradients > 0 for costs in measured.parts.values())
    assert {(row["unit"], row["tp"]) for row in report["kinds"] if row["kind"] == "layer"} == {
        (unit, tp) for unit in measured.parts for tp in (1, 2)
    }
    assert report["worst_error"] >= report["worst_error_of_a_unit"] >= 0
    assert [stage["unit"] for stage in report["stages"]] == list(measured.parts)
    assert all(min(costs.step_s) > 0 and sum(costs.microbatch_s) >= 0 for costs in measured.parts.values())
    assert report["uncertainty"].keys() == measured.parts.keys()
    assert report["whole_model"]["forecast_s"] > 0
    assert report["whole_model"]["measured_s"] > 0


def test_the_table_shows_measured_beside_fitted_and_the_worst_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "llm.json"
    assert main(["profile", "tiny", "--units", "llm", *COUNTS, "--precision", "bf16", "--out", str(out)]) == 0
    table = capsys.readouterr().out
    assert all(
        word in table
        for word in ("positions", "measured", "+-", "fitted", "error", "embedding", "head", "the worst error of the", "update")
    )
    document = json.loads(out.read_text())
    assert document["measured_on"]["dtype"] == "bf16"
    assert list(document["units"]) == ["llm"]
    assert document["units"]["llm"]["step"]["update_s"] > 0
    assert document["measured_on"]["uncertainty"].startswith("llm ")


def test_uncertain_times_are_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--units", "vision", *COUNTS, "--within", "1e-9", "--format", "json", "--out", str(tmp_path / "c.json")]
    assert main(["profile", "tiny", *options]) == 0
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert re.search(r"warning: the times of vision(, whose layers take \S+ ms a sample,)? are known to \+-\S+% only", said.err)
    assert json.loads(said.out)["uncertainty"]["vision"] > 1e-9


@pytest.mark.slow
def test_processes_beside_it_measure_the_same_and_end_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, document = profile(tmp_path, capsys, "tiny", "--units", "vision", "--beside", "1", "--device", "cpu")
    assert document["measured_on"]["beside"] == "1 processes that did the same"
    assert [path.name for path in tmp_path.iterdir()] == ["coefficients.json"]


def test_a_unit_of_transformers_is_measured_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "my-llama"
    transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    ).save_pretrained(folder)
    _, document = profile(tmp_path, capsys, "tiny", "--llm", str(folder), "--units", "llm")
    assert (document["huggingface"], document["units"]["llm"]["layers"]) == ({"llm": "my-llama"}, 3)


def test_an_interrupted_profile_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "coefficients.json"
    out.write_text("of before")
    monkeypatch.setattr(LayerTimer, "rounds", interrupted)
    assert main(["profile", "tiny", *COUNTS, "--out", str(out)]) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["coefficients.json"]
    assert out.read_text() == "of before"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["9000b"], "no model '9000b'; there are tiny"),
        (["tiny", "--tokens", "64,128"], "--tokens needs at least 3 different numbers for a curve, got 64,128"),
        (["tiny", "--tokens", "64,x"], "--tokens must be numbers from 1 to 1,048,576 like 64,256,1024, got 'x'"),
        (["tiny", "--tokens", "9000,9001,9002"], "--tokens has only [] up to the 5120 positions that vision has at most"),
        (["tiny", "--tp", "1,3"], "tp 3 of unit 'vision' does not divide its heads 2: set its tp to a divisor of 2"),
        (["tiny", "--units", "generator"], "--units names 'generator', but model 'tiny' has vision, audio, llm"),
        (["tiny", "--units", "llm", "--check"], "--check compares the whole model"),
        (["tiny", "--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["tiny", "--within", "0"], "--within must be a share above 0, --seconds at least 0 and --beside from 0 to 64, got 0.0"),
        (["tiny", "--beside", "-1"], "--beside from 0 to 64, got 0.02, 30.0 and -1"),
        (["tiny", "--out", "."], "--out . is a folder: name a file in it"),
        (["tiny", "--out", "nowhere/c.json"], "cannot write to nowhere/c.json: No such file"),
        (["tiny", "--llm", "nowhere"], "there is no config.json of a model at nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_user_can_fix_in_a_profile_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert sentence in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# -- what a plan makes of it -------------------------------------------------------------------------------------------

BACKWARD = {"input_gradients": 2.0, "weight_gradients": 0.5, "rerun": 1.25}


@pytest.fixture
def table(tmp_path: Path) -> str:
    """A cost table of one sample: 3 in vision, 5 in the LLM."""
    path = tmp_path / "costs.jsonl"
    path.write_text(json.dumps({"sample_id": 0, "cost_vision": 3.0, "cost_llm": 5.0}) + "\n")
    return str(path)


def coefficients(tmp_path: Path, *units: str) -> str:
    path = tmp_path / "of_table.json"
    path.write_text(json.dumps({"units": {unit: {"layers": 2, "linear_s": 1.0, "backward": BACKWARD} for unit in units}}))
    return str(path)


def step_s(capsys: pytest.CaptureFixture[str], *arguments: str) -> float:
    one = ["--replicas", "1", "--microbatches", "1", "--stages", "vision=1,llm=1", "--strategy", "random", "--format", "json"]
    assert main(["plan", *arguments, *one]) == 0
    seconds: float = json.loads(capsys.readouterr().out)["predicted"]["iteration_s"]
    return seconds


def test_a_plan_takes_the_measured_times_of_the_backward(tmp_path: Path, capsys: pytest.CaptureFixture[str], table: str) -> None:
    measured = ["--coefficients", coefficients(tmp_path, "vision", "llm")]
    assert step_s(capsys, table) == pytest.approx(8 * (1 + 2))
    assert step_s(capsys, table, *measured) == pytest.approx(8 * (1 + 2.0 + 0.5))
    assert step_s(capsys, table, *measured, "--checkpointing", "llm") == pytest.approx(8 * 3.5 + 5 * 1.25)
    assert step_s(capsys, table, *measured, "--frozen", "vision,llm") == pytest.approx(8 + 5 * 2.0), "the projector learns"


def test_coefficients_without_a_unit_of_the_table_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], table: str
) -> None:
    path = coefficients(tmp_path, "llm")
    assert main(["simulate", table, "--coefficients", path, "--out", str(tmp_path / "out")]) == 2
    assert f"{path} has no times of unit 'vision', but {table} has vision, llm" in capsys.readouterr().err
    assert read_cost_table(table).backward == {}
