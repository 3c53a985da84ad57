"""Corrections are fitted to measured seconds, with outliers left out, and applied to estimated ones."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reorder_service.planning.cost_model.correction import (
    UNCORRECTED,
    Correction,
    Line,
    Observation,
    Ranks,
    UnitCorrection,
    fit,
)
from headrace.reorder_service.planning.execution import Execution
from headrace.schedule import Kind

UNITS = ("vision", "llm")


def steps(scale: float, constant: float, *, noise: float = 0.0, stalled: int = 0, count: int = 8) -> list[Observation]:
    """Steps in which the llm's forward follows a line. `stalled`: how many actions of the first step took ten times as long."""
    rng = np.random.default_rng(0)
    observed = []
    for number in range(count):
        estimated = rng.uniform(1.0, 5.0, 16)
        measured = (scale * estimated + constant) * rng.normal(1.0, noise, 16)
        measured[: stalled if number == 0 else 0] *= 10
        line = Line(estimated_s=estimated, actions=np.ones(16), measured_s=measured, stage_s=np.array([measured.sum()]))
        observed.append(Observation(units={("llm", Kind.FORWARD): line}))
    return observed


@given(scale=st.floats(1e-6, 1e6), constant=st.floats(0.0, 1.0))
def test_a_fit_finds_the_line_that_the_measurements_lie_on(scale: float, constant: float) -> None:
    lines = fit(steps(scale, constant * scale), Execution(), UNITS).units["llm"]
    assert lines.scale[Kind.FORWARD] == pytest.approx(scale, rel=1e-6)
    assert lines.microbatch_s[Kind.FORWARD] == pytest.approx(constant * scale, rel=1e-5, abs=1e-6 * scale)


def test_noise_and_a_first_step_that_stalled_move_it_by_a_few_per_cent() -> None:
    lines = fit(steps(3.0, 1.0, noise=0.05, stalled=16), Execution(), UNITS).units["llm"]
    assert pytest.approx(3.0 * lines.scale[0] + lines.microbatch_s[0], rel=0.02) == 3.0 * 3.0 + 1.0


def test_where_all_microbatches_are_equal_the_slope_carries_them() -> None:
    line = Line(estimated_s=np.full(4, 2.0), actions=np.ones(4), measured_s=np.full(4, 6.0), stage_s=np.array([24.0]))
    lines = fit([Observation(units={("llm", Kind.FORWARD): line})], Execution(), UNITS).units["llm"]
    assert (lines.scale[0], lines.microbatch_s[0]) == (3.0, 0.0)


def test_actions_that_are_only_known_together_count_as_many() -> None:
    """Two replicas of an encoder whose samples are dealt out anew: each has its own constant."""
    estimated = np.array([2.0, 4.0, 6.0])
    line = Line(estimated_s=estimated, actions=np.full(3, 2.0), measured_s=5.0 * estimated + 2 * 0.5, stage_s=np.array([63.0]))
    lines = fit([Observation(units={("llm", Kind.FORWARD): line})], Execution(), UNITS).units["llm"]
    assert (lines.scale[0], lines.microbatch_s[0]) == (pytest.approx(5.0), pytest.approx(0.5))


@pytest.mark.parametrize("meet", ["microbatch", "step"])
def test_ranks_with_all_units_tell_the_units_apart_by_their_mix(meet: str) -> None:
    rng, observed = np.random.default_rng(1), []
    for _ in range(6):
        estimated = rng.uniform(1.0, 5.0, (4, 3, 2))
        measured = estimated @ np.array([3.0, 0.5])
        if meet == "microbatch":
            measured = np.tile(measured.max(axis=0), (4, 1))
        observed.append(Observation(ranks=Ranks(estimated_s=estimated, measured_s=measured)))
    execution = Execution(colocated=meet, backward_factors={"vision": 0.0})  # type: ignore[arg-type]
    correction = fit(observed, execution, UNITS)
    assert correction.units["vision"].scale == (pytest.approx(3.0), 0.0, 0.0)
    assert correction.units["llm"].scale == (pytest.approx(0.5), pytest.approx(1.0), 0.0)


def test_nothing_measured_corrects_nothing() -> None:
    nan = Ranks(estimated_s=np.ones((2, 2, 2)), measured_s=np.full((2, 2), np.nan))
    assert fit([Observation()], Execution(), UNITS) == UNCORRECTED
    assert fit([Observation(ranks=nan)], Execution(colocated="step"), UNITS) == UNCORRECTED


def test_a_unit_that_was_not_measured_goes_by_the_mean_of_the_others() -> None:
    units = {"vision": UnitCorrection(scale=(2.0, 4.0, 0.0)), "llm": UnitCorrection(scale=(8.0, 16.0, 0.0))}
    seconds = Correction(units=units).seconds(dict.fromkeys(("vision", "audio", "llm"), np.ones(1)))
    assert {unit: column.tolist() for unit, column in seconds.items()} == {"vision": [2.0], "audio": [4.0], "llm": [8.0]}


def test_a_document_of_a_correction_comes_back_to_the_last_bit() -> None:
    for correction in (fit(steps(1 / 3, 0.1), Execution(), UNITS), UNCORRECTED):
        document = json.loads(json.dumps(correction.to_document()))
        back = Correction.from_document(document)
        assert json.loads(json.dumps(back.to_document())) == document
        assert back.seconds({"llm": np.ones(1)}) == correction.seconds({"llm": np.ones(1)})
