"""What an FSDP rank says of when it ran which unit of which microbatch."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from headrace.schedule import Kind
from headrace.trainer.loading import stopwatch
from headrace.trainer.orchestrated.orchestrated_loader import OrchestratedMicrobatch, OrchestratedStep
from headrace.trainer.pipeline.cargo import Cargo
from headrace.trainer.pipeline.chunk import Inputs
from headrace.trainer.pipeline.topology import PipelineTopology

TOPOLOGY = PipelineTopology.model_validate({"units": {"vision": {"dp": 2, "on": "llm"}, "llm": {"dp": 2}}})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The present monotonic time, which only the test moves."""
    now_s = [100.0]
    monkeypatch.setattr(stopwatch.time, "monotonic", lambda: now_s[0])
    return now_s


def rows(**numbers: int) -> Mapping[str, Cargo | None]:
    """What a rank has of each unit; a unit that is not named has no sample."""
    return {unit: Cargo(inputs=[Inputs(num_rows=numbers[unit])]) if unit in numbers else None for unit in TOPOLOGY.units}


def test_each_unit_s_place_tells_its_phases_of_the_microbatches_that_the_rank_has_samples_of(clock: list[float]) -> None:
    step = OrchestratedStep(0, (), (), TOPOLOGY, 1)
    for index, cargo in enumerate((rows(vision=4, llm=9), rows(vision=0, llm=7))):
        microbatch = OrchestratedMicrobatch(index=index, cargo=cargo, laps=step._laps)
        for unit, kind in (("vision", Kind.FORWARD), ("llm", Kind.FORWARD), ("llm", Kind.BACKWARD), ("vision", Kind.BACKWARD)):
            clock[0] += 8.0  # exchanges
            with microbatch.timed(unit, kind):
                clock[0] += 1.0 if kind is Kind.FORWARD else 2.0
    of_vision, of_llm = step.work()
    assert [(one.unit, one.replica, one.stage, one.kind) for one in (*of_vision, *of_llm)] == [
        (unit, 1, 0, kind) for unit in ("vision", "llm") for kind in (Kind.FORWARD, Kind.BACKWARD)
    ]
    assert [(one.microbatches, one.seconds) for one in of_vision] == [((0,), (1.0,)), ((0,), (2.0,))]
    assert [(one.microbatches, one.seconds) for one in of_llm] == [((0, 1), (1.0, 1.0)), ((0, 1), (2.0, 2.0))]
    assert of_llm[0].begins_s == (0.0, 38.0)
    assert of_llm[0].origin_unix_s - of_vision[0].origin_unix_s == pytest.approx(9.0, abs=1e-3)


def test_a_rank_without_a_sample_in_a_step_tells_nothing() -> None:
    step = OrchestratedStep(0, (), (), TOPOLOGY, 0)
    with OrchestratedMicrobatch(index=0, cargo=rows(), laps=step._laps).timed("llm", Kind.FORWARD):
        pass
    assert step.work() == [[], []]
