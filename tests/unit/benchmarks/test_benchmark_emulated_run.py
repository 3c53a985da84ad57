"""The emulated run of the orchestrate benchmark holds steps against both forecasts, and is given up in time."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.orchestrate import emulated_run

FOUND: dict[str, Any] = {
    "searches": [
        {
            "placement": "nested",
            "units": {"vision": {"dp": 4, "tp": 1, "pp": 1}, "llm": {"dp": 2, "tp": 1, "pp": 2}},
            "on_llm": ["vision"],
            "microbatches": 4,
        }
    ],
    "steps_s": [2.0, 2.1, 9.0],
}


def step(*, predicted_s: float, measured_s: float) -> dict[str, Any]:
    return {"strategy": "entrain", "predicted_s": predicted_s, "measured_s": measured_s, "overhead_per_action_s": 2e-4}


def test_the_error_is_that_of_the_mean_step_by_either_forecast() -> None:
    steps = [step(predicted_s=1.9, measured_s=2.0), step(predicted_s=1.98, measured_s=2.0)]
    of_emulation, of_orchestrate = emulated_run.rows_of(FOUND, steps)
    assert of_emulation.name == "EMULATED nested, vision 4 x 1 x 1 on llm, llm 2 x 1 x 2: the mean of 2 steps"
    assert (of_emulation.value, of_emulation.ok) == (pytest.approx(3.0), True)
    assert "measured 2 s, forecast of what is emulated 1.94 s; 4 microbatches, planned by entrain; an action takes 200 µs" in (
        of_emulation.detail
    )
    assert (of_orchestrate.value, of_orchestrate.detail) == (pytest.approx(2.5), "forecast 2.05 s"), (
        "of the batches that were run"
    )


def test_a_step_that_takes_far_longer_misses_the_goal() -> None:
    of_emulation, of_orchestrate = emulated_run.rows_of(FOUND, [step(predicted_s=2.0, measured_s=2.5)])
    assert (of_emulation.value, of_emulation.ok) == (pytest.approx(20.0), False)
    assert (of_orchestrate.value, of_orchestrate.ok) == (pytest.approx(20.0), False)


def test_a_placement_that_is_not_done_in_time_is_a_row_that_misses_its_goal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated_run, "LONGEST_S", 0.0)
    [section] = emulated_run.sections()
    assert "EMULATED" in section.title
    assert [(row.name, row.ok) for row in section.rows] == [("could not be measured", False)] * len(emulated_run.PLACEMENTS)
    assert section.rows[0].detail == "failed: disaggregated: not done within 0 s"
