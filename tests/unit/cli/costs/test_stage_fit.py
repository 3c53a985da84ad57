"""From the times of a whole stage to what its layers take in it, and what a microbatch and a step take besides."""

from __future__ import annotations

import pytest

from headrace.backward_factors import BackwardTimes
from headrace.cli.costs.stage_fit import FittedStage
from headrace.reorder_service.planning.cost_model.coefficients import TARGETS, LayerCost
from headrace.reorder_service.planning.cost_model.measured_costs import PartCosts
from headrace.trainer.profiling.profiled_batch import BatchShape
from headrace.trainer.profiling.robust_estimate import Estimate
from headrace.trainer.profiling.stage_times import StageTimes

COSTS = PartCosts(
    layers=(LayerCost(linear=1e-5), LayerCost(linear=1e-5, quadratic=1e-8)),
    ends={"embedding": LayerCost(constant=1e-4), TARGETS: LayerCost(linear=5e-5), "projector": LayerCost(linear=2e-6)},
    backward=BackwardTimes(input_gradients=1.2, weight_gradients=0.8),
)
LENGTHS = ((16,), (16, 17), (64,), (64, 65, 64), (256,), (256, 257))


def forward_s(lengths: tuple[int, ...], part: str) -> float:
    """Of the layers and ends, by hand: on the LLM one token of eight carries loss; a generator's projector is elsewhere."""
    seconds = sum(2e-5 * x + 1e-8 * x * x + 1e-4 for x in lengths)
    if part == "llm":
        seconds += sum(5e-5 * -(-x // 8) for x in lengths)
    return seconds + (sum(2e-6 * x for x in lengths) if part != "generator" else 0.0)


def exact(value: float) -> Estimate:
    return Estimate(value=value, half_width=0.0)


def times_of(part: str, noise: float = 0.0) -> StageTimes:
    """A stage in which layers take 1.1 and 0.9 of their times, and a microbatch 2 and 3 ms besides."""
    estimated = [forward_s(lengths, part) * (1 + noise * (-1) ** number) for number, lengths in enumerate(LENGTHS)]
    grids = [tuple((1, length) for length in lengths) for lengths in LENGTHS]
    return StageTimes(
        part=part,
        layers=(0, 1),
        shapes=tuple(BatchShape(part=part, grids=grid, targets_every=8) for grid in grids),
        forward_s=tuple(exact(1.1 * seconds + 2e-3) for seconds in estimated),
        backward_s=tuple(exact(0.9 * 2.0 * seconds + 3e-3) for seconds in estimated),
        gradients_s=exact(4e-3),
        update_s=exact(5e-3),
    )


@pytest.mark.parametrize("part", ["llm", "vision", "generator"])
def test_lines_are_found_that_the_times_lie_on(part: str) -> None:
    fitted = FittedStage.of(times_of(part), COSTS if part == "llm" else PartCosts(
        layers=COSTS.layers, ends={name: end for name, end in COSTS.ends.items() if name != TARGETS}, backward=COSTS.backward
    ))  # fmt: skip
    assert fitted.forward == pytest.approx((1.1, 2e-3))
    assert fitted.backward == pytest.approx((0.9, 3e-3))
    assert max(map(abs, fitted.errors)) < 1e-9


def test_what_the_lines_miss_is_said() -> None:
    errors = FittedStage.of(times_of("llm", noise=0.1), COSTS).errors
    assert 0.02 < max(map(abs, errors)) < 0.15


def test_costs_are_those_in_a_stage_at_any_width() -> None:
    fitted = FittedStage.of(times_of("llm"), COSTS)
    half = PartCosts(layers=(LayerCost(linear=6e-6),) * 2, ends=COSTS.ends, backward=COSTS.backward, tp=2)
    for costs in (COSTS, half):
        applied = fitted.applied_to(costs)
        assert applied.forward.seconds(100) == pytest.approx(1.1 * costs.forward.seconds(100))
        whole = applied.backward.input_gradients + applied.backward.weight_gradients
        assert whole * applied.forward.seconds(100) == pytest.approx(0.9 * 2.0 * costs.forward.seconds(100))
        assert applied.microbatch_s == pytest.approx((2e-3, 3e-3))
        assert (applied.step_s, applied.tp, applied.backward.rerun) == ((4e-3, 5e-3), costs.tp, 1.0)
