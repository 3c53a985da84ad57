"""Templates: the exact GPU-stage mapping, the node specification, and what a template says about nodes and units."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.errors import UserError
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.simulation.makespan import makespan
from headrace.reorder_service.planning.simulation.timed_schedule import schedule_table
from headrace.reorder_service.recovery.pipeline_templates import ModelProfile, NodeSpecification, Template, plan_templates
from headrace.reorder_service.recovery.stage_mapping import Chains, iteration_time
from tests.examples import with_examples
from tests.unit.reorder_service.recovery.recovery_world import Mapping, breakdown, every_mapping, profile_of, profiles


def mapping_of(template: Template) -> Mapping:
    return [(stage.node, stage.gpus, stage.layers.start, stage.layers.stop) for stage in template.stages]


def check_against_every_mapping(profile: ModelProfile, num_nodes: int) -> None:
    """Every size on its own: feasible where there is a mapping, and as fast as the best one."""

    def cost(mapping: Mapping) -> float:
        return breakdown(profile, mapping) / (4 * len(mapping))

    best = {}
    for size in range(1, num_nodes + 1):
        best[size] = min(map(cost, every_mapping(profile, size)), default=None)
    feasible = [size for size, least in best.items() if least is not None]
    if not feasible:
        with pytest.raises(UserError, match="do not hold the model once"):
            plan_templates(profile, num_nodes, 0)
        return
    templates = plan_templates(profile, num_nodes, 0)
    assert templates.specification.smallest == feasible[0]
    for size, template in templates.of_size.items():
        mapping = mapping_of(template)
        assert mapping in list(every_mapping(profile, size))
        assert cost(mapping) == pytest.approx(best[size], rel=1e-9)
        assert template.iteration_time(4 * len(mapping)) == pytest.approx(breakdown(profile, mapping), rel=1e-9)


@with_examples(80)
@given(profile=profiles(), num_nodes=st.integers(1, 3))
def test_a_mapping_is_as_fast_as_the_best_of_all(profile: ModelProfile, num_nodes: int) -> None:
    check_against_every_mapping(profile, num_nodes)


@with_examples(40)
@given(seed=st.integers(0, 10_000), scaling=st.floats(0, 1), num_nodes=st.integers(1, 3))
def test_also_where_no_two_mappings_are_equally_fast(seed: int, scaling: float, num_nodes: int) -> None:
    seconds = np.random.default_rng(seed).lognormal(0, 1, (7, 1)) / np.arange(1, 3) ** scaling
    profile = profile_of(seconds.tolist(), units={"encoder": 3, "llm": 4})
    check_against_every_mapping(profile, num_nodes)


@with_examples(30)
@given(profile=profiles(num_layers=12), num_nodes=st.integers(1, 4))
def test_a_template_of_a_size_does_not_depend_on_the_others(profile: ModelProfile, num_nodes: int) -> None:
    bounds = profile.unit_bounds
    ends = np.repeat(bounds[1:], np.diff(bounds))
    of_node = profile.gpus_per_node
    chains = Chains.of(profile.seconds, profile.gpu_bytes, ends, profile.memory_bytes, num_nodes, of_node)
    alone = Chains.of(profile.seconds, profile.gpu_bytes, ends, profile.memory_bytes, num_nodes + 2, of_node)
    assume(chains.feasible(num_nodes))
    assert chains.fastest(num_nodes).tolist() == alone.fastest(num_nodes).tolist()


def test_gpus_that_gain_little_are_stages_of_their_own() -> None:
    """Two GPUs are hardly faster than one. Together they would take 7.2 seconds for the four microbatches of one stage, 1.8 each;
    apart it is 9 seconds, but for eight."""
    template = plan_templates(profile_of([[1.0, 0.9]] * 2), 1, 0).of_size[1]
    assert [stage.gpus for stage in template.stages] == [1, 1]
    assert template.iteration_time(8) == pytest.approx(9.0)


def test_gpus_that_may_not_share_a_stage_have_one_each() -> None:
    """Two nodes of three GPUs: a stage on each, in order, though two GPUs of a node would take half the time."""
    template = plan_templates(profile_of([[1.0]] * 8, gpus_per_node=3), 2, 0).of_size[2]
    assert [(stage.node, stage.gpu, stage.gpus) for stage in template.stages] == [(n, g, 1) for n in (0, 1) for g in (0, 1, 2)]
    assert sorted(len(stage.layers) for stage in template.stages) == [1, 1, 1, 1, 2, 2]


def test_a_stage_says_which_gpu_of_its_node_is_its_first() -> None:
    template = plan_templates(profile_of([[1.0, 0.4]] * 2 + [[3.0, 1.2]] * 4, units={"vision": 2, "llm": 4}), 2, 0).of_size[2]
    for node in (0, 1):
        gpus = [(stage.gpu, stage.gpus) for stage in template.stages if stage.node == node]
        assert gpus in ([(0, 1), (1, 1)], [(0, 2)])


def test_more_gpus_than_a_node_has_cannot_share_a_stage() -> None:
    with pytest.raises(ValueError, match="2 GPUs cannot share a stage on nodes of 1"):
        profile_of([[1.0, 0.9]], gpus_per_node=1)


def test_a_single_stage_takes_its_four_microbatches() -> None:
    template = plan_templates(profile_of([[2.5]]), 1, 0).of_size[1]
    assert template.iteration_time(4) == 4 * 2.5


def test_of_equally_slow_stages_the_last_counts_which_is_the_time_of_1f1b() -> None:
    """The first would give 122 seconds for what takes 131."""
    stages = np.array([10.0, 1.0, 10.0])
    kinds = np.array(Execution().factors("llm"))
    seconds = np.tile(stages[:, None] * kinds / kinds.sum(), (12, 1, 1))
    assert iteration_time(stages, 12) == 131
    assert makespan(seconds, np.arange(12), schedule_table({"llm": 3}, Execution(), 12)) == pytest.approx(131)


def test_units_stand_in_one_chain_and_may_meet_on_a_node() -> None:
    profile = profile_of([[1.0, 0.4]] * 2 + [[3.0, 1.2]] * 4, units={"vision": 2, "llm": 4}, memory=2)  # two layers a stage
    template = plan_templates(profile, 2, 0).of_size[2]
    assert [stage.unit for stage in template.stages] == ["vision", "llm", "llm"]
    assert template.nodes_of("vision") == range(0, 1)
    assert template.nodes_of("llm") == range(0, 2)
    assert [template.layers_of(node) for node in range(2)] == [range(0, 4), range(4, 6)]
    assert sum(stage.gpus for stage in template.stages) == 4


def test_the_smallest_template_holds_the_model_and_the_largest_leaves_room_for_the_other_replicas() -> None:
    profile = profile_of([[1.0]] * 6, gpu_bytes=[[10]] * 6, memory=20)
    templates = plan_templates(profile, 10, 1)
    assert templates.specification == NodeSpecification(num_nodes=10, max_failures=1, smallest=3, largest=6)
    assert [template.num_nodes for template in templates.of_size.values()] == [3, 4, 5, 6]
    assert templates.layer_bytes.tolist() == [10] * 6


def test_too_few_nodes_say_how_many_it_takes() -> None:
    profile = profile_of([[1.0]] * 6, gpu_bytes=[[10]] * 6, memory=20)
    with pytest.raises(UserError, match=r"5 nodes do not hold the 2 replicas .* with 3 nodes each: give at least 6 nodes"):
        plan_templates(profile, 5, 1)
    with pytest.raises(UserError, match="2 nodes do not hold the model once"):
        plan_templates(profile, 2, 0)


@pytest.mark.parametrize(("seconds", "units"), [([[1.0], [0.0]], None), ([[1.0]], {"llm": 2}), ([[float("nan")]], None)])
def test_a_profile_that_does_not_fit_together_is_refused(seconds: list[list[float]], units: dict[str, int] | None) -> None:
    with pytest.raises(ValueError, match="seconds"):
        profile_of(seconds, units=units)


def addable(sizes: range, fewest: int, num_nodes: int) -> bool:
    """Whether so many or more of the sizes, each as often as one likes, add up to the nodes."""
    if num_nodes <= 0:
        return num_nodes == 0 and fewest <= 0
    return any(addable(sizes, fewest - 1, num_nodes - size) for size in sizes if size <= num_nodes)


@with_examples(60)
@given(smallest=st.integers(1, 4), further=st.integers(0, 3), max_failures=st.integers(0, 2), beyond=st.integers(0, 8))
def test_usable_nodes_are_those_that_sizes_add_up_to(smallest: int, further: int, max_failures: int, beyond: int) -> None:
    largest = smallest + further
    specification = NodeSpecification(num_nodes=99, max_failures=max_failures, smallest=smallest, largest=largest)
    num_nodes = specification.least_nodes + beyond
    usable = specification.usable(num_nodes)
    assert [addable(specification.sizes, max_failures + 1, count) for count in range(usable, num_nodes + 1)] == [
        True,
        *[False] * (num_nodes - usable),
    ]


def test_frobenius_as_many_sizes_as_nodes_in_the_smallest_add_up_to_every_number() -> None:
    for smallest in range(1, 6):
        for max_failures in range(3):
            least = (max_failures + 1) * smallest
            for num_nodes in range(least, least + 12):
                largest = num_nodes - max_failures * smallest
                specification = NodeSpecification(
                    num_nodes=num_nodes, max_failures=max_failures, smallest=smallest, largest=largest
                )
                assert specification.usable(num_nodes) == num_nodes
                if len(specification.sizes) >= smallest:
                    assert specification.caveat == ""
                every = all(specification.usable(count) == count for count in range(least, least + 60))
                assert every == (specification.caveat == "")


def test_where_nodes_would_be_idle_a_sentence_says_so() -> None:
    specification = NodeSpecification(num_nodes=6, max_failures=1, smallest=3, largest=3)
    assert specification.caveat == (
        "of 7 nodes 1 would be idle, as pipelines have 3 to 3 nodes, and only 3 consecutive sizes add up to every number: start "
        "with at least 8 nodes, or with nodes that have more memory, so that a pipeline needs fewer of them"
    )
