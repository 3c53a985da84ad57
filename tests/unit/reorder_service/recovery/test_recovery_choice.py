"""What decides between pipelines that copy the fewest bytes and the fastest ones."""

from __future__ import annotations

import pytest

from headrace.reorder_service.recovery.pipeline_templates import plan_templates
from headrace.reorder_service.recovery.reconfiguration import Pipeline
from headrace.reorder_service.recovery.recovery_choice import Choice, Circumstances, OnLoss, choose
from tests.unit.reorder_service.recovery.recovery_world import profile_of

# Four layers of a second and a byte each. A node alone does a microbatch in 4 s; two behind each other do m of them in
# 2 m + 2 s. So nodes are best alone.
TEMPLATES = plan_templates(profile_of([[1.0]] * 4, memory=4), 4, 1)
PAIRS = [Pipeline(template=TEMPLATES.of_size[2], nodes=nodes) for nodes in (("a", "b"), ("c", "d"))]


def chosen(circumstances: Circumstances, *, units_per_second: float = 1.0) -> Choice:
    """When "d" is lost, with 12 microbatches. Either "c" gets two bytes from "b" and a step takes 18 s, or "a" does as well, and
    a step takes 16 s."""
    return choose(TEMPLATES, PAIRS, circumstances, lost=["d"], joined=(), num_microbatches=12, units_per_second=units_per_second)


def sizes(choice: Choice) -> list[int]:
    return sorted(len(pipeline.nodes) for pipeline in choice.option.after.pipelines)


def test_more_is_copied_for_faster_pipelines_where_that_pays() -> None:
    choice = chosen(Circumstances(rebuild_s=0.5, copy_bytes_per_s=1.0, horizon_s=23.0))
    assert sizes(choice) == [1, 1, 1]
    assert (choice.option.step_s, choice.pause_s) == (16.0, 4.5)
    assert choice.text == (
        "1+1+1 (0.0 MiB to copy in 4.00 s, 16 s a step) do more in 23 s than 2+1 (0.0 MiB to copy in 2.00 s, 18 s a step)"
    )


def test_the_fewest_bytes_are_copied_where_the_next_change_comes_soon_or_copying_is_slow() -> None:
    assert sizes(chosen(Circumstances(rebuild_s=0.0, copy_bytes_per_s=1.0, horizon_s=19.0))) == [1, 2]
    assert sizes(chosen(Circumstances(rebuild_s=0.0, copy_bytes_per_s=0.05))) == [1, 2]


def test_pipelines_that_copy_least_and_are_fastest_are_taken_without_a_comparison() -> None:
    alone = [Pipeline(template=TEMPLATES.of_size[1], nodes=(node,)) for node in "abcd"]
    choice = choose(TEMPLATES, alone, Circumstances(), lost=["a"], joined=(), num_microbatches=12)
    assert choice.text == "1+1+1 (0.0 MiB to copy in 0.00 s, 16 s a step) copy the fewest bytes and are the fastest"


def test_seconds_are_those_of_the_clock_and_not_of_the_templates() -> None:
    choice = chosen(Circumstances(copy_bytes_per_s=1e9), units_per_second=100.0)
    assert choice.option.step_s == pytest.approx(0.16)


def test_without_a_measured_step_the_fewest_bytes_decide() -> None:
    choice = chosen(Circumstances(), units_per_second=0.0)
    assert sizes(choice) == [1, 2]
    assert "no step was measured yet" in choice.text


# -- a loss in the middle of a step -----------------------------------------------------------------------------------


def after_loss(num_nodes: int, *, on_loss: OnLoss = OnLoss.AUTO, rebuild_s: float = 0.5, units_per_second: float = 1.0) -> Choice:
    """Of one of so many nodes that are best alone, with three microbatches of 4 s each."""
    templates = plan_templates(profile_of([[1.0]] * 4, memory=4), num_nodes, 1)
    alone = [Pipeline(template=templates.of_size[1], nodes=(f"n{number}",)) for number in range(num_nodes)]
    circumstances = Circumstances(rebuild_s=rebuild_s)
    options = {"lost": ["n0"], "joined": (), "num_microbatches": 3 * num_nodes, "on_loss": on_loss}
    options |= {"units_per_second": units_per_second}
    return choose(templates, alone, circumstances, **options)  # type: ignore[arg-type]


def test_many_pipelines_do_the_microbatches_of_one_sooner_than_they_repeat_all() -> None:
    """Half of 12 s, one microbatch more, and 0.5 s to meet; all again would be 16 s."""
    choice = after_loss(4)
    assert choice.rerouting_s == 4.5
    assert choice.text.endswith(
        "; the step under way would be done in 10.5 s by the pipelines that are whole, in 16 s by the new ones; "
        "the lost microbatches are rerouted first"
    )


def test_meeting_twice_may_take_longer_than_it_saves() -> None:
    choice = after_loss(4, rebuild_s=6.5)
    assert choice.rerouting_s is None
    assert choice.text.endswith("in 16.5 s by the pipelines that are whole, in 16 s by the new ones; rebuilt at once")


def test_a_pipeline_of_its_own_length_is_filled_twice_when_microbatches_are_rerouted() -> None:
    """Two pairs: half of 2 * 4 + 2 s, another ten for the other half, against nodes that are best alone."""
    choice = choose(
        TEMPLATES, PAIRS, Circumstances(), lost=["d"], joined=(), num_microbatches=8, units_per_second=1.0, on_loss=OnLoss.AUTO
    )
    assert choice.option.step_s == 12.0
    assert choice.rerouting_s is None


@pytest.mark.parametrize(("on_loss", "rerouted"), [(OnLoss.AUTO, False), (OnLoss.REROUTE, True), (OnLoss.REBUILD, False)])
def test_without_a_measured_step_only_an_order_has_microbatches_rerouted(on_loss: OnLoss, rerouted: bool) -> None:
    assert (after_loss(4, on_loss=on_loss, units_per_second=0.0).rerouting_s is not None) is rerouted


def test_what_is_ordered_is_done_whatever_it_takes() -> None:
    assert after_loss(4, on_loss=OnLoss.REROUTE, rebuild_s=100.0).rerouting_s == 104.0
    assert after_loss(4, on_loss=OnLoss.REBUILD).rerouting_s is None
