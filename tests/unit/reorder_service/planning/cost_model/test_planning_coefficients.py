"""Measured coefficients: what a fit finds, and what a file may say."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from headrace.backward_factors import BackwardTimes
from headrace.model_shape import MODEL_SHAPES
from headrace.reorder_service.planning.cost_model.coefficients import Coefficients, LayerCost, fit, total
from headrace.reorder_service.planning.cost_model.coefficients_document import document_of, parse_coefficients
from headrace.reorder_service.planning.cost_model.measured_costs import MeasuredCosts, PartCosts
from tests.examples import with_examples

POSITIONS = [64, 256, 1024, 4096, 16_384]  # Entrain's
BACKWARD = {"input_gradients": 1.2, "weight_gradients": 0.8, "rerun": 1.1}
coefficient = st.one_of(st.just(0.0), st.floats(1e-12, 1.0))


def coefficients(document: object) -> Coefficients:
    return parse_coefficients(document).coefficients


def times(cost: LayerCost, positions: list[int] = POSITIONS) -> list[float]:
    return [cost.quadratic * x * x + cost.linear * x + cost.constant for x in positions]


def relative_error(cost: LayerCost, positions: list[int], seconds: list[float]) -> float:
    return sum((got / wanted - 1) ** 2 for got, wanted in zip(times(cost, positions), seconds, strict=True))


# -- fit ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "true",
    [
        LayerCost(quadratic=3e-12, linear=2e-8, constant=1e-5),
        LayerCost(quadratic=3e-12),
        LayerCost(linear=2e-8),
        LayerCost(constant=1e-5),
        LayerCost(quadratic=3e-12, constant=1e-5),
    ],
)
def test_a_layer_that_follows_the_curve_is_found(true: LayerCost) -> None:
    got = fit(POSITIONS, times(true))
    np.testing.assert_allclose(times(got), times(true), rtol=1e-9)
    for power in ("quadratic", "linear", "constant"):
        scale = {"quadratic": 64**2, "linear": 64, "constant": 1}[power]  # a share of the shortest time counts as nothing
        assert getattr(got, power) == pytest.approx(getattr(true, power), rel=1e-6, abs=1e-9 * times(true)[0] / scale)


def test_noise_of_a_few_percent_moves_the_prediction_by_no_more() -> None:
    true = LayerCost(quadratic=3e-12, linear=2e-8, constant=1e-5)
    noise = np.random.default_rng(0).uniform(0.97, 1.03, (20, 5))
    got = fit(POSITIONS * 20, (noise * times(true)).ravel())
    np.testing.assert_allclose(times(got, [100, 2000, 10_000]), times(true, [100, 2000, 10_000]), rtol=0.03)


def test_falling_times_give_a_constant_and_no_negative_slope() -> None:
    got = fit([1, 2, 3, 4], [4.0, 3.0, 2.0, 1.0])
    assert (got.quadratic, got.linear) == (0, 0)
    assert got.constant == pytest.approx((1 / 4 + 1 / 3 + 1 / 2 + 1) / (1 / 16 + 1 / 9 + 1 / 4 + 1))  # of relative errors


def test_bent_times_give_no_negative_square() -> None:
    got = fit([100, 400, 1600, 6400], [1.0, 2.0, 4.0, 8.0])  # like the root of the length
    assert got.quadratic == 0
    assert min(got.linear, got.constant) > 0


@with_examples(60)
@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0.1, 10.0)), min_size=3, max_size=8, unique_by=lambda pair: pair[0]))
def test_no_step_to_either_side_of_a_fit_is_better(measured: list[tuple[int, float]]) -> None:
    """The problem is convex, so a point that no small step improves is the optimum."""
    positions, seconds = [x for x, _ in measured], [y for _, y in measured]
    got = fit(positions, seconds)
    values = np.array([got.quadratic, got.linear, got.constant])
    assert values.min() >= 0
    reached = relative_error(got, positions, seconds)
    unit = min(seconds) / np.array([max(positions) ** 2, max(positions), 1.0])
    for step in itertools.product((-1e-4, 0, 1e-4), repeat=3):
        moved = np.maximum(values + unit * step, 0).tolist()
        near = LayerCost(quadratic=moved[0], linear=moved[1], constant=moved[2])
        assert relative_error(near, positions, seconds) >= reached - 1e-12


@pytest.mark.parametrize(
    ("positions", "seconds", "message"),
    [
        ([1, 2, 3], [1.0, 2.0], r"lists of one length, got shapes \(3,\) and \(2,\)"),
        ([1, 2, 3], [1.0, 0.0, 2.0], "finite and positive, but measurement 1 is 2.0 and 0.0"),
        ([1, 2, 3], [1.0, 2.0, float("nan")], "measurement 2 is 3.0 and nan"),
        ([-1, 2, 3], [1.0, 2.0, 3.0], "measurement 0 is -1.0"),
        ([64, 64, 256], [1.0, 1.1, 2.0], r"needs as many different positions, got \[64.0, 256.0\]"),
        ([], [], r"needs as many different positions, got \[\]"),
    ],
)
def test_measurements_without_a_curve_are_refused(positions: list[int], seconds: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(positions, seconds)


@given(st.lists(st.builds(LayerCost, quadratic=coefficient, linear=coefficient, constant=coefficient), max_size=6))
@with_examples(30)
def test_the_total_of_layers_costs_what_they_cost_one_by_one(layers: list[LayerCost]) -> None:
    np.testing.assert_allclose(times(total(layers)), np.sum([[0.0] * 5, *map(times, layers)], axis=0), rtol=1e-12)


# -- the file ----------------------------------------------------------------------------------------------------------


def test_equal_layers_are_given_once() -> None:
    document = {"units": {"vision": {"layers": 3, "quadratic_s": 1e-12, "linear_s": 2e-8, "constant_s": 1e-6}}}
    assert coefficients(document) == {"vision": (LayerCost(quadratic=1e-12, linear=2e-8, constant=1e-6),) * 3}


def test_layers_may_differ_and_leave_out_zeros() -> None:
    got = coefficients({"units": {"llm": {"layers": [{"linear_s": 4}, {"quadratic_s": 1, "constant_s": 0}]}}})
    assert got == {"llm": (LayerCost(linear=4.0), LayerCost(quadratic=1.0))}


def test_measured_times_are_fitted() -> None:
    seconds = times(LayerCost(quadratic=3e-12, linear=2e-8))
    measured = {"positions": POSITIONS, "seconds": seconds}
    got = coefficients({"units": {"audio": {"layers": 2, **measured}, "llm": {"layers": [measured]}}})
    assert got == {"audio": (fit(POSITIONS, seconds),) * 2, "llm": (fit(POSITIONS, seconds),)}


def test_json_and_yaml_say_the_same() -> None:
    text = '{"units": {"llm": {"layers": 28, "quadratic_s": 1e-12, "linear_s": 2e-8}}}'
    in_yaml = "units:\n  llm:\n    layers: 28\n    quadratic_s: 1e-12\n    linear_s: 2.0e-08\n"
    assert yaml.safe_load(in_yaml)["units"]["llm"]["quadratic_s"] == "1e-12"  # text, to YAML 1.1
    assert parse_coefficients(json.loads(text)) == parse_coefficients(yaml.safe_load(in_yaml))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (None, "has one field, 'units'"),
        ([], "has one field, 'units'"),
        ({}, "has one field, 'units'"),
        ({"units": {}}, "has one field, 'units'"),
        ({"units": {"llm": {"layers": 1, "linear_s": 1}}, "unit": 1}, "has one field, 'units'"),
        ({"units": {"encoder": {}}}, "no unit 'encoder' to give coefficients for; there are vision, audio, llm, generator"),
        ({"units": {"llm": 3}}, "units.llm must be a mapping of fields, got 3"),
        ({"units": {"llm": {"linear_s": 1}}}, "units.llm.layers is required"),
        ({"model": 7, "units": {"llm": {"layers": 1, "linear_s": 1}}}, "model must be a name, got 7"),
        ({"measured_on": "cpu", "units": {"llm": {"layers": 1, "linear_s": 1}}}, "measured_on must be texts by name, got 'cpu'"),
    ],
)
def test_a_file_of_another_form_is_refused(document: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_coefficients(document)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"layers": 0, "linear_s": 1}, "units.llm.layers must be a number from 1 to 10000 or a list of layers, got 0"),
        ({"layers": 10**12, "linear_s": 1}, "units.llm.layers must be a number from 1 to 10000"),
        ({"layers": True, "linear_s": 1}, "units.llm.layers must be .*, got True"),
        ({"layers": [], "linear_s": 1}, r"units.llm.layers must be .*, got \[\]"),
        ({"layers": 2}, "units.llm must have some of quadratic_s, linear_s, constant_s, or positions and seconds"),
        ({"layers": [{"linear_s": 1}, 7]}, r"units.llm.layers\[1\] must have some of"),
        ({"layers": [{"linear_s": 1}], "linear_s": 1}, "units.llm.linear_s stands beside a list of layers"),
        ({"layers": 2, "linear_s": -1}, "units.llm.linear_s must be a number from 0 to 1e.09, got -1"),
        ({"layers": 2, "linear_s": float("nan")}, "units.llm.linear_s must be a number .*, got nan"),
        ({"layers": 2, "linear_s": float("inf")}, "units.llm.linear_s must be a number .*, got inf"),
        ({"layers": 2, "linear_s": 10**400}, "units.llm.linear_s must be a number"),
        ({"layers": 2, "linear_s": "fast"}, "units.llm.linear_s must be a number .*, got 'fast'"),
        ({"layers": 2, "linear_s": None}, "units.llm.linear_s must be a number .*, got None"),
        ({"layers": 2, "linear_s": True}, "units.llm.linear_s must be a number .*, got True"),
        ({"layers": 2, "linear": 1}, "units.llm.linear: there is no such field; a layer has quadratic_s, linear_s"),
        ({"layers": 2, "positions": [1, 2, 3]}, "units.llm.positions: there is no such field"),
        ({"layers": 2, "positions": 64, "seconds": [1]}, "units.llm.positions must be a list of numbers, got 64"),
        ({"layers": 2, "positions": [64], "seconds": ["x"]}, r"units.llm.seconds\[0\] must be a number .*, got 'x'"),
        ({"layers": 2, "positions": [1, 2], "seconds": [1, 1]}, "units.llm: a curve of 3 coefficients needs as many different"),
        (
            {"layers": 2, "linear_s": 1, "ends": {"head": {"linear_s": -1}}},
            "units.llm.ends.head.linear_s must be a number .*, got -1",
        ),
        (
            {"layers": 2, "linear_s": 1, "backward": {"rerun": 1}},
            "units.llm.backward must have input_gradients, weight_gradients",
        ),
        (
            {"layers": 2, "linear_s": 1, "backward": BACKWARD | {"rerun": -1}},
            "units.llm.backward.rerun must be .* 0 to 100, got -1",
        ),
        ({"layers": 2, "linear_s": 1, "microbatch": 3}, "units.llm.microbatch must be a mapping of fields, got 3"),
        (
            {"layers": 2, "linear_s": 1, "microbatch": {"forward_s": 1}},
            "units.llm.microbatch must have forward_s and backward_s, got",
        ),
        (
            {"layers": 2, "linear_s": 1, "step": {"gradients_s": 1, "update_s": -1}},
            "units.llm.step.update_s must be a number from 0 .*, got -1",
        ),
        ({"layers": 2, "linear_s": 1, "tp": 0}, "units.llm.tp must be a number of slices from 1, got 0"),
        ({"layers": [{"positions": [1, 2], "seconds": [1]}]}, r"units.llm.layers\[0\]: positions and seconds must be lists of"),
    ],
)
def test_a_wrong_entry_is_named_with_its_rule(entry: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_coefficients({"units": {"llm": entry}})
    assert "\n" not in str(caught.value)


# -- measured costs ----------------------------------------------------------------------------------------------------

layer = st.builds(LayerCost, quadratic=coefficient, linear=coefficient, constant=coefficient)
ratio = st.floats(0, 100)
part = st.builds(
    PartCosts,
    layers=st.lists(layer, min_size=1, max_size=3).map(tuple),
    ends=st.dictionaries(st.sampled_from(["embedding", "projector"]), layer, max_size=2),
    backward=st.builds(BackwardTimes, input_gradients=ratio, weight_gradients=ratio, rerun=ratio),
    tp=st.integers(1, 8),
    microbatch_s=st.sampled_from([(0.0, 0.0), (1e-3, 0.25)]),
    step_s=st.sampled_from([(0.0, 0.0), (0.0, 2e-3)]),
)
costs = st.builds(
    MeasuredCosts,
    parts=st.dictionaries(st.sampled_from(["vision", "audio", "llm", "generator"]), part, min_size=1),
    model=st.sampled_from(["", "tiny"]),
    huggingface=st.dictionaries(st.just("llm"), st.text(max_size=5)),
    measured_on=st.dictionaries(st.sampled_from(["device", "dtype"]), st.text(max_size=5)),
)


@with_examples(40)
@given(costs)
def test_measured_costs_survive_their_file(measured: MeasuredCosts) -> None:
    assert parse_coefficients(json.loads(json.dumps(document_of(measured)))) == measured


def test_the_slices_of_a_tensor_parallel_width_stand_beside_the_whole_layers_and_have_the_same_ends() -> None:
    whole = {"layers": 2, "linear_s": 4.0, "ends": {"head": {"linear_s": 9.0}}, "backward": BACKWARD}
    document = {"units": {"llm": {**whole, "slices": {"2": {"layers": 2, "linear_s": 2.5}}}}}
    fixed = {"microbatch": {"forward_s": 1.0, "backward_s": 2.0}, "step": {"gradients_s": 3.0, "update_s": 4.0}}
    document["units"]["llm"] |= fixed
    halves = parse_coefficients(document, {"llm": 2}).parts["llm"]
    assert (halves.microbatch_s, halves.step_s) == ((1.0, 2.0), (3.0, 4.0))
    assert (halves.layers, halves.ends, halves.tp) == ((LayerCost(linear=2.5),) * 2, {"head": LayerCost(linear=9.0)}, 2)
    assert parse_coefficients(document, {"llm": 1}) == parse_coefficients(document)
    with pytest.raises(ValueError, match=r"units.llm was measured at tensor-parallel width 1, 2, but the unit's tp is 4"):
        parse_coefficients(document, {"llm": 4})


def test_the_backward_of_the_encoder_is_the_mean_of_its_parts_weighted_by_their_forward() -> None:
    def of(seconds: float, ratio: float) -> PartCosts:
        return PartCosts(
            layers=(LayerCost(constant=seconds),),
            backward=BackwardTimes(input_gradients=ratio, weight_gradients=2 * ratio, rerun=3 * ratio),
        )

    measured = MeasuredCosts(parts={"vision": of(3.0, 1.0), "audio": of(1.0, 2.0), "llm": of(1.0, 0.5)})
    times = measured.backward_times(["encoder", "llm"])
    assert times["encoder"] == BackwardTimes(input_gradients=1.25, weight_gradients=2.5, rerun=3.75)
    assert times["llm"] == BackwardTimes(input_gradients=0.5, weight_gradients=1.0, rerun=1.5)
    assert list(MeasuredCosts(parts={"llm": of(1.0, 0.5)}).backward_times(["vision", "llm"])) == ["llm"]


def test_what_a_microbatch_takes_besides_goes_by_the_backward_that_there_is() -> None:
    def of(forward_s: float, backward_s: float) -> PartCosts:
        times = BackwardTimes(input_gradients=1.5, weight_gradients=0.5)
        return PartCosts(
            layers=(LayerCost(linear=1.0),), backward=times, microbatch_s=(forward_s, backward_s), step_s=(forward_s, 1.0)
        )

    measured = MeasuredCosts(parts={"vision": of(1.0, 4.0), "audio": of(2.0, 6.0), "llm": of(0.0, 0.0)})
    learning = measured.microbatch_s(["encoder", "llm"], {"encoder": 2.0, "llm": 2.0})
    assert learning == {"encoder": (3.0, 10.0)}, "both encoders together, and nothing of a unit that has none"
    assert measured.microbatch_s(["vision"], {"vision": 0.0}) == {"vision": (1.0, 0.0)}, "frozen"
    assert measured.microbatch_s(["vision"], {"vision": 3.0}) == {"vision": (1.0, 6.0)}, "with checkpointing"
    assert measured.step_s("encoder") == (3.0, 2.0)


def test_files_of_older_releases_take_nothing_besides_samples_and_their_heads_count_every_token() -> None:
    entry = {"layers": 2, "linear_s": 1.0, "ends": {"head": {"linear_s": 5.0}}, "backward": BACKWARD}
    measured = parse_coefficients({"units": {"llm": entry}})
    assert measured.microbatch_s(["llm"], {"llm": 2.0}) == {}
    assert measured.step_s("llm") == (0.0, 0.0)
    assert measured.coefficients == {"llm": (LayerCost(linear=1.0),) * 2 + (LayerCost(linear=5.0),)}


def of_tiny(**layers: int) -> MeasuredCosts:
    counts = {"vision": 2, "audio": 2, "llm": 4} | layers
    return MeasuredCosts(
        parts={name: PartCosts(layers=(LayerCost(linear=1.0),) * count) for name, count in counts.items() if count}, model="tiny"
    )


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        (
            of_tiny(llm=28),
            "are of model 'tiny' and have 28 layers of llm, but model 'tiny' has 4: measure it with `headrace profile",
        ),
        (of_tiny(llm=3), "have 3 layers of llm, but model 'tiny' has 4"),
        (of_tiny(generator=2), "have a part 'generator', but model 'tiny' has only vision, audio, llm"),
        (of_tiny(audio=0), "have vision, llm, but the job's units need audio too"),
    ],
)
def test_the_costs_of_another_model_are_refused_with_both_numbers(measured: MeasuredCosts, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measured.check_model("tiny", MODEL_SHAPES["tiny"], ("encoder", "llm"))


def test_the_layers_of_a_hugging_face_model_are_not_compared_with_those_of_the_named_one() -> None:
    replace(of_tiny(llm=24), huggingface={"llm": "Qwen2.5-0.5B"}).check_model("tiny", MODEL_SHAPES["tiny"], ("encoder", "llm"))


def test_ends_may_be_counted_among_the_layers_unless_they_are_given_apart() -> None:
    of_tiny(vision=3, llm=6).check_model("tiny", MODEL_SHAPES["tiny"], ("vision", "llm"))
    parts = {"llm": PartCosts(layers=(LayerCost(linear=1.0),) * 5, ends={"head": LayerCost(linear=1.0)})}
    with pytest.raises(ValueError, match="have 5 layers of llm, but model 'tiny' has 4"):
        MeasuredCosts(parts=parts).check_model("tiny", MODEL_SHAPES["tiny"])
