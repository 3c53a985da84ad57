"""Backward over forward: the table of Cornstarch's rules, and the rules themselves layer by layer."""

import itertools

import pytest

from headrace.backward_factors import BackwardTimes, backward_factors, weight_factor
from headrace.reorder_service.planning.execution import BACKWARD_FACTOR, Execution

UNITS = ("vision", "audio", "llm", "generator")


def subsets(items: tuple[str, ...]) -> list[set[str]]:
    return [set(chosen) for count in range(len(items) + 1) for chosen in itertools.combinations(items, count)]


def test_all_trained_is_the_default_of_an_execution() -> None:
    assert backward_factors(UNITS) == dict.fromkeys(UNITS, BACKWARD_FACTOR)


@pytest.mark.parametrize(
    ("frozen", "projectors", "expected"),
    [
        ({"encoder"}, True, {"encoder": 0, "llm": 2}),
        ({"llm"}, True, {"encoder": 2, "llm": 1}),
        ({"encoder", "llm"}, True, {"encoder": 0, "llm": 1}),  # the projector's gradient comes through the LLM
        ({"encoder", "llm"}, False, {"encoder": 0, "llm": 0}),
        ({"llm"}, False, {"encoder": 2, "llm": 1}),
    ],
)
def test_encoder_and_llm(frozen: set[str], projectors: bool, expected: dict[str, float]) -> None:
    units = ("encoder", "llm")
    assert backward_factors(units, frozen=frozen, frozen_projectors=() if projectors else units) == expected


def test_one_trainable_encoder_is_enough_for_the_llm_and_does_not_concern_the_other() -> None:
    got = backward_factors(UNITS, frozen={"audio", "llm", "generator"}, frozen_projectors=UNITS)
    assert got == {"vision": 2, "audio": 0, "llm": 1, "generator": 1}


def test_a_generator_sends_gradients_to_a_trainable_llm() -> None:
    got = backward_factors(UNITS, frozen={"vision", "audio", "generator"}, frozen_projectors=UNITS)
    assert got == {"vision": 0, "audio": 0, "llm": 2, "generator": 1}


def test_one_trainable_projector_is_enough() -> None:
    got = backward_factors(("vision", "audio", "llm"), frozen={"vision", "audio", "llm"}, frozen_projectors={"vision"})
    assert got == {"vision": 0, "audio": 0, "llm": 1}


def test_an_llm_alone_has_no_projector_in_front() -> None:
    assert backward_factors(("llm",), frozen={"llm"}) == {"llm": 0}
    assert backward_factors(("llm", "generator"), frozen={"llm", "generator"}) == {"llm": 0, "generator": 1}


def test_checkpointing_runs_a_forward_again_where_there_is_a_backward() -> None:
    got = backward_factors(("encoder", "llm", "generator"), frozen={"encoder", "llm"}, checkpointing={"encoder", "llm"})
    assert got == {"encoder": 0, "llm": 2, "generator": 2}
    assert backward_factors(("encoder", "llm"), checkpointing={"llm"}) == {"encoder": 2, "llm": 3}


@pytest.mark.parametrize("projectors", [True, False])
@pytest.mark.parametrize("frozen", subsets(UNITS), ids=lambda names: "+".join(sorted(names)) or "none")
def test_units_follow_the_equations_layer_by_layer(frozen: set[str], projectors: bool) -> None:
    """Equations 3.2 and 3.3 along each branch, with a projector as a layer of its own behind each encoder and the LLM."""

    def along(branch: list[tuple[str, bool]]) -> dict[str, float]:
        factors, behind_trainable = {}, False
        for name, is_frozen in branch:
            behind_trainable = behind_trainable or not is_frozen
            factors[name] = (0.0 if is_frozen else 1.0) + (1.0 if behind_trainable else 0.0)
        return factors

    tail = [("llm", "llm" in frozen), ("projector", not projectors), ("generator", "generator" in frozen)]
    branches = [along([(name, name in frozen), ("projector", not projectors), *tail]) for name in ("vision", "audio")]
    expected = {unit: max(branch.get(unit, 0.0) for branch in branches) for unit in UNITS}
    assert backward_factors(UNITS, frozen=frozen, frozen_projectors=() if projectors else UNITS) == expected


def test_stages_of_a_topology_will_do_and_the_result_runs() -> None:
    factors = backward_factors({"encoder": 2, "llm": 6}, frozen={"encoder"})
    assert Execution(backward_factors=factors).backward_factor("encoder") == 0


def test_zero_bubble_puts_off_the_weights_part_of_a_backward() -> None:
    """What is run again belongs to the rest; what is frozen has no such part."""
    factors = backward_factors(UNITS, frozen={"llm"}, checkpointing={"vision", "llm"})
    weights = {"llm": weight_factor(frozen=True), "vision": weight_factor(frozen=False)}
    split = Execution(schedule="zero-bubble", backward_factors=factors, weight_gradient_factors=weights)
    assert {unit: split.factors(unit) for unit in ("vision", "audio", "llm")} == {
        "vision": (1, 2, 1),
        "audio": (1, 1, 1),
        "llm": (1, 2, 0),
    }
    assert Execution(backward_factors=factors, weight_gradient_factors=weights).factors("vision") == (1, 3, 0)


def test_weights_that_are_more_than_their_backward_are_refused() -> None:
    with pytest.raises(ValueError, match=r"from 0 to the backward's own factor, got \{'llm': 1.5\}"):
        Execution(backward_factors={"llm": 1.0}, weight_gradient_factors={"llm": 1.5})


@pytest.mark.parametrize("option", ["frozen", "frozen_projectors", "checkpointing"])
def test_a_unit_that_there_is_not_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} names unit 'vit', but the units are encoder, llm"):
        backward_factors(("encoder", "llm"), **{option: ["llm", "vit"]})


def test_first_layers_that_are_frozen_weigh_by_their_share() -> None:
    """A frozen layer passes gradients on only where something in front of it learns."""
    units, shares = ("encoder", "llm"), {"llm": 0.75}
    assert backward_factors(units, frozen_shares=shares) == {"encoder": 2, "llm": 0.75 * 1 + 0.25 * 2}
    wholly = {"frozen": ["encoder"], "frozen_projectors": ["encoder"]}
    assert backward_factors(units, frozen_shares=shares, **wholly) == {"encoder": 0, "llm": 0.25 * 2}
    assert backward_factors(units, frozen_shares=shares, checkpointing=["llm"], **wholly) == {"encoder": 0, "llm": 0.25 * 3}
    assert backward_factors(units, frozen_shares={"encoder": 0.5}, frozen=["llm"]) == {"encoder": 1, "llm": 1}
    assert weight_factor(frozen=False, frozen_share=0.75) == 0.25
    with pytest.raises(ValueError, match="the frozen share of unit 'llm' must be from 0 to less than 1, got 1"):
        backward_factors(units, frozen_shares={"llm": 1})


def test_measured_times_replace_the_counted_ones() -> None:
    """Cornstarch (dissertation, table 3.1b): with checkpointing, 375.93 / 140.39 ms of a trained LLM, 284.50 / 138.33 frozen."""
    times = BackwardTimes(input_gradients=284.50 / 138.33 - 1, weight_gradients=375.93 / 140.39 - 284.50 / 138.33)
    given = {"checkpointing": ["llm"], "measured": {"llm": times}}
    assert backward_factors(("encoder", "llm"), **given) == {"encoder": 2, "llm": pytest.approx(375.93 / 140.39)}
    assert backward_factors(("encoder", "llm"), frozen=["llm"], **given)["llm"] == pytest.approx(284.50 / 138.33)
    assert weight_factor(frozen=False, times=times) == times.weight_gradients
    with pytest.raises(ValueError, match="rerun must be finite and not negative, got -1"):
        BackwardTimes(rerun=-1)
