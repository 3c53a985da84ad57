"""What a GPU holds over a step reaches what the judge says of its stage, and comes and goes with its actions."""

from dataclasses import replace

import numpy as np
import pytest

from headrace.reorder_service.planning.orchestration.candidate import Candidate, UnitGrid
from headrace.reorder_service.planning.orchestration.demand import Demand, UnitDemand
from headrace.reorder_service.planning.orchestration.judge import draw_batches, judge, simulated
from headrace.reorder_service.planning.orchestration.judgement import Judgement
from headrace.reorder_service.planning.orchestration.memory_curve import MemoryCurve, memory_curves
from tests.unit.reorder_service.planning.orchestration.orchestration_world import GIB, cluster_of, unit_of

SAMPLES = (0.5, 1.0, 1.5, 1.0)
SCHEDULES = [("1f1b", 1), ("gpipe", 1), ("eager", 1), ("zero-bubble", 1), ("interleaved", 2)]


def demand_of(schedule: str = "1f1b", chunks: int = 1, batch: int = 16, **vision: object) -> Demand:
    kept = {"kept": 2 * GIB, "layers": 8, "widths": (1,), "samples": SAMPLES}
    return Demand(
        units=(unit_of("vision", 1.0, **{**kept, **vision}), unit_of("llm", 3.0, **kept)),
        cluster=cluster_of(4),
        global_batch=batch,
        schedule=schedule,
        chunks=chunks,
    )


def candidate(vision: tuple[int, int], llm: tuple[int, int], microbatches: int, placement: str = "disaggregated") -> Candidate:
    """Replicas and stages of both."""
    grids = {unit: UnitGrid(dp=dp, tp=1, pp=pp) for unit, (dp, pp) in {"vision": vision, "llm": llm}.items()}
    return Candidate(search="test", grids=grids, microbatches=microbatches, placement=placement)


def _sliced(unit: UnitDemand) -> dict[str, object]:
    """The same times and activations on two slices, halved."""
    return {
        "forward_s": {1: unit.forward_s[1], 2: unit.forward_s[1] / 2},
        "kept_bytes": {1: unit.kept_bytes[1], 2: unit.kept_bytes[1] / 2},
    }


def curves_of(demand: Demand, one: Candidate, strategy: str = "disttrain") -> tuple[Judgement, tuple[MemoryCurve, ...]]:
    batches = draw_batches(demand, 1, 0)
    judged = judge(demand, one, batches, strategy)
    step = simulated(demand, one, batches[0], strategy)
    assert step.step_s == judged.step_s
    return judged, memory_curves(demand, one, step, judged.ranks)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("grids", [((1, 2), (1, 2)), ((1, 1), (2, 2)), ((3, 1), (2, 1))])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_most_is_what_the_judge_says_of_the_stage(
    schedule: str, chunks: int, grids: tuple[tuple[int, int], tuple[int, int]], frozen: bool
) -> None:
    vision = {"trained_share": 0.0, "backward_factor": 0.0} if frozen else {}
    one = candidate(*grids, microbatches=4)
    judged, curves = curves_of(demand_of(schedule, chunks, **vision), one)
    assert [(curve.unit, curve.stage) for curve in curves] == [(rank.unit, rank.stage) for rank in judged.ranks]
    for curve, rank in zip(curves, judged.ranks, strict=True):
        assert curve.peak == pytest.approx(rank.total)
        assert curve.activations.max() == pytest.approx(rank.activations)
        assert curve.gradients.max() == pytest.approx(rank.gradients)
        assert (curve.time_s[0], curve.time_s[-1]) == (0.0, judged.step_s)
        assert (np.diff(curve.time_s) >= 0).all()
        assert curve.activations[0] == curve.gradients[0] == 0.0
        assert curve.activations[-1] == pytest.approx(0.0, abs=1.0), "what a forward takes is given back"
        assert curve.gradients[-1] == pytest.approx(rank.gradients / one.grids[curve.unit].dp)


def test_an_eager_schedule_is_as_deep_as_the_gpu_has_room_for() -> None:
    demand = demand_of("eager", batch=64)
    judged, curves = curves_of(demand, candidate((1, 1), (1, 1), microbatches=64))
    assert judged.fits
    assert curves[0].peak == pytest.approx(judged.ranks[0].total)
    assert curves[0].peak > 0.8 * judged.memory_bytes, "64 microbatches of 2 GiB would not fit"


def test_a_stage_takes_with_its_forward_and_gives_back_with_its_backward() -> None:
    """Two microbatches of one sample, on one stage behind an encoder of nothing: forward of 1 s, backward of 2 s."""
    unit = {"layers": 2, "widths": (1,), "parameters": 1e9}
    demand = Demand(
        units=(unit_of("vision", 0.0, **{**unit, "parameters": 1.0}), unit_of("llm", 3.0, kept=GIB, **unit)),
        cluster=cluster_of(1),
        global_batch=2,
    )
    _, curves = curves_of(demand, candidate((1, 1), (1, 1), microbatches=2))
    llm = curves[1]

    def at(time_s: float) -> tuple[float, float]:
        entry = np.searchsorted(llm.time_s, time_s, side="right") - 1
        return llm.activations[entry] / GIB, llm.gradients[entry]

    assert [at(time_s) for time_s in (0.5, 1.5, 3.5, 5.5)] == [
        (1.0, 0.0),
        (1.0, 4e9),
        (1.0, 4e9),
        (1.0, 4e9),
    ], "the second forward begins when the first backward has ended"
    assert at(6.5)[0] == 0.0
    assert (llm.weights, llm.optimizer) == (6e9, 8e9)


def test_replicas_keep_their_share_of_the_gradients_behind_the_last_backward() -> None:
    _, curves = curves_of(demand_of(), candidate((2, 1), (4, 1), microbatches=2))
    assert [curve.gradients[-1] / curve.gradients.max() for curve in curves] == [0.5, 0.25]


def test_colocated_ranks_hold_a_microbatch_at_a_time() -> None:
    demand = demand_of()
    judged, [curve] = curves_of(demand, candidate((4, 1), (4, 1), 2, placement="colocated"))
    [rank] = judged.ranks
    assert curve.peak == pytest.approx(rank.total)
    assert curve.activations.max() == pytest.approx(rank.activations)
    assert (curve.time_s[0], curve.time_s[-1]) == (0.0, judged.step_s)
    assert curve.activations[-1] == pytest.approx(0.0, abs=1.0)
    emptied = curve.activations[1:-1] < 1.0
    assert emptied.any(), "between the microbatches nothing is held"


@pytest.mark.parametrize("placement", ["encoders-first", "nested"])
@pytest.mark.parametrize("slices", [1, 2])
def test_gpus_that_encoders_share_hold_what_the_judge_says_at_most(placement: str, slices: int) -> None:
    demand = replace(demand_of(), units=tuple(replace(unit, **_sliced(unit)) for unit in demand_of().units))
    one = candidate((4 * slices, 1), (2, 2), 4, placement=placement)
    one = replace(one, grids={**one.grids, "llm": replace(one.grids["llm"], tp=slices)})
    judged, curves = curves_of(demand, one)
    assert [(curve.unit, curve.stage) for curve in curves] == [(rank.unit, rank.stage) for rank in judged.ranks]
    for curve, rank in zip(curves, judged.ranks, strict=True):
        assert curve.activations.max() == pytest.approx(rank.activations)
        assert curve.gradients.max() <= rank.gradients * (1 + 1e-9)
        assert curve.peak <= rank.total * (1 + 1e-9)
        assert curve.activations[-1] == pytest.approx(0.0, abs=1.0)
        assert (curve.time_s[0], curve.time_s[-1]) == (0.0, judged.step_s)
