"""Pipeline schedules as data: what each stage does, in which order, and that no stage ever waits for ever."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.backward_factors import backward_factors, weight_factor
from headrace.plan import Topology
from headrace.reorder_service.planning import plan
from headrace.reorder_service.planning.execution import Execution
from headrace.schedule import SCHEDULES, Action, Kind, Schedule, build, inputs, stage_graph
from tests.examples import with_examples

STAGES = {"vision": 2, "audio": 1, "llm": 5}

topologies = st.builds(
    lambda encoders, llm, generator: {f"e{i}": n for i, n in enumerate(encoders)} | {"llm": llm} | generator,
    st.lists(st.integers(1, 4), max_size=3),
    st.integers(1, 5),
    st.one_of(st.just({}), st.integers(1, 3).map(lambda n: {"generator": n})),
)


def text(schedule: Schedule) -> list[str]:
    return [" ".join(f"{'FBW'[a.kind]}{a.microbatch}{'abcd'[a.chunk] if a.chunk else ''}" for a in line) for line in schedule]


def in_flight(actions: tuple[Action, ...]) -> int:
    """Most forwards whose last action is still to come."""
    held = most = 0
    last = max(action.kind for action in actions)
    for action in actions:
        held += 1 if action.kind == Kind.FORWARD else -(action.kind == last)
        most = max(most, held)
    return most


def ends(
    stages: Mapping[str, int], schedule: Schedule, chunks: int, backward: float = 2.0, weight: float = 1.0
) -> dict[tuple[int, Action], float]:
    """When every action ends if all microbatches take 1 for a forward. Fails if the schedule waits for itself."""
    graph = stage_graph(stages)
    split = any(action.kind == Kind.WEIGHT for actions in schedule for action in actions)
    seconds = (1.0, backward - weight * split, weight)
    end: dict[tuple[int, Action], float] = {}
    free = [0.0] * len(graph)
    left = [list(actions) for actions in schedule]
    while any(left):
        before = len(end)
        for s, actions in enumerate(left):
            while actions and all(needed in end for needed in inputs(graph, chunks, s, actions[0])):
                action = actions.pop(0)
                ready = max((end[needed] for needed in inputs(graph, chunks, s, action)), default=0.0)
                free[s] = end[s, action] = max(free[s], ready) + seconds[action.kind] / chunks
        assert len(end) > before, "the schedule waits for itself"
    return end


def step(name: str, stages: Mapping[str, int], count: int, chunks: int = 1) -> float:
    return max(ends(stages, build(name, stages, range(count), chunks=chunks), chunks).values())


def forward(microbatch: int, chunk: int = 0) -> Action:
    return Action(kind=Kind.FORWARD, microbatch=microbatch, chunk=chunk)


def backward(microbatch: int, chunk: int = 0) -> Action:
    return Action(kind=Kind.BACKWARD, microbatch=microbatch, chunk=chunk)


def test_the_stages_of_the_units_form_a_graph() -> None:
    graph = stage_graph(STAGES | {"generator": 1})
    assert [(stage.unit, stage.index, stage.size) for stage in graph] == [
        ("vision", 0, 2), ("vision", 1, 2), ("audio", 0, 1), *(("llm", i, 5) for i in range(5)), ("generator", 0, 1),
    ]  # fmt: skip
    assert [stage.before for stage in graph] == [(), (), (), (1, 2), (), (), (), (), (7,)]
    assert [stage.behind for stage in graph] == [None, 3, 3, None, None, None, None, 8, None]
    assert [stage.num_behind for stage in graph] == [7, 6, 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("stage", "action", "expected"),
    [
        (0, forward(4), []),
        (2, forward(4), []),
        (1, forward(4), [(0, forward(4))]),
        (0, forward(4, 1), [(1, forward(4))]),
        (3, forward(4), [(1, forward(4, 1)), (2, forward(4, 1))]),
        (3, forward(4, 1), [(7, forward(4))]),
        (8, forward(4), [(7, forward(4, 1))]),
        (8, backward(4, 1), [(8, forward(4, 1))]),
        (8, backward(4), [(8, backward(4, 1))]),
        (7, backward(4, 1), [(8, backward(4))]),
        (7, backward(4), [(3, backward(4, 1))]),
        (5, backward(4, 1), [(6, backward(4, 1))]),
        (1, backward(4, 1), [(3, backward(4))]),
        (2, backward(4, 1), [(3, backward(4))]),
    ],
)
def test_an_action_needs_its_neighbour_the_chunk_before_or_the_units_in_front(stage, action, expected) -> None:
    assert list(inputs(stage_graph(STAGES | {"generator": 1}), 2, stage, action)) == expected


def test_1f1b_warms_up_alternates_and_drains() -> None:
    assert text(build("1f1b", {"llm": 3}, range(4))) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_encoders_side_by_side_warm_up_for_the_stages_behind_them_only() -> None:
    vision_first, vision_last, audio, *_ = build("1f1b", STAGES, range(9))
    assert text((vision_first,))[0].startswith("F0 F1 F2 F3 F4 F5 F6 B0 F7 B1 ")
    assert vision_last == audio
    assert text((audio,))[0].startswith("F0 F1 F2 F3 F4 F5 B0 F6 B1 ")


def test_with_fewer_microbatches_than_stages_the_early_stages_run_all_forwards_first() -> None:
    assert text(build("1f1b", {"llm": 4}, range(2))) == ["F0 F1 B0 B1", "F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"]


def test_gpipe_runs_all_forwards_then_all_backwards() -> None:
    assert text(build("gpipe", {"vision": 1, "llm": 1}, range(3))) == ["F0 F1 F2 B0 B1 B2"] * 2


def test_eager_opens_with_all_that_may_be_in_flight() -> None:
    assert text(build("eager", {"llm": 3}, range(5))) == [
        "F0 F1 F2 F3 F4 B0 B1 B2 B3 B4",
        "F0 F1 F2 F3 F4 B0 B1 B2 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]
    assert text(build("eager", {"llm": 3}, range(5), in_flight=4))[0] == "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4"


def test_eager_below_the_need_of_1f1b_keeps_its_limit_and_takes_longer() -> None:
    stages, limited = {"llm": 4}, build("eager", {"llm": 4}, range(8), in_flight=2)
    assert [in_flight(actions) for actions in limited] == [2, 2, 2, 1]
    assert max(ends(stages, limited, 1).values()) > step("1f1b", stages, 8)


def test_interleaved_passes_chunk_after_chunk_a_unit_at_a_time() -> None:
    # Megatron-LM's order: two microbatches (one per stage) a group, 3 warm-up forwards on stage 0, 2 on stage 1; b is chunk 1.
    schedule = build("interleaved", {"llm": 2}, range(4), chunks=2)
    order = [[text(((a,),))[0] for a in actions if a.kind == Kind.FORWARD] for actions in schedule]
    assert order == [["F0", "F1", "F0b", "F1b", "F2", "F3", "F2b", "F3b"]] * 2
    order = [[text(((a,),))[0] for a in actions if a.kind == Kind.BACKWARD] for actions in schedule]
    assert order == [["B0b", "B1b", "B0", "B1", "B2b", "B3b", "B2", "B3"]] * 2
    assert text(schedule)[1].startswith("F0 F1 F0b B0b F1b B1b F2 B0")


def weight(microbatch: int) -> Action:
    return Action(kind=Kind.WEIGHT, microbatch=microbatch)


def test_zero_bubble_puts_weights_off_the_longer_the_less_a_stage_opens_with() -> None:
    assert text(build("zero-bubble", {"llm": 3}, range(4))) == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]
    assert inputs(stage_graph({"llm": 3}), 1, 1, weight(2)) == ((1, backward(2)),)


@with_examples(60)
@given(st.integers(1, 6), st.integers(0, 6), st.sampled_from([1.0, 1.5, 2.0]), st.sampled_from([0.0, 0.5, 1.0]))
def test_zero_bubble_leaves_equal_stages_idle_for_what_its_weights_do_not_fill(num_stages, more, of_inputs, of_weights) -> None:
    stages, count = {"llm": num_stages}, num_stages + more
    schedule = build("zero-bubble", stages, range(count))
    seconds = max(ends(stages, schedule, 1, of_inputs + of_weights, of_weights).values())
    bubble = (num_stages - 1) * (1 + of_inputs - of_weights)
    assert seconds == pytest.approx(count * (1 + of_inputs + of_weights) + bubble)


@with_examples(100)
@given(topologies, st.integers(1, 13), st.lists(st.sampled_from([0.2, 1.0, 3.0]), min_size=5, max_size=5))
def test_zero_bubble_is_never_slower_than_1f1b_on_equal_microbatches(stages, count, loads) -> None:
    stage_s = dict(zip(stages, loads, strict=False))
    assert_no_slower_than_1f1b(stages, count, stage_s, Execution(schedule="zero-bubble"))


@with_examples(60)
@given(topologies, st.integers(1, 13), st.data())
def test_where_units_are_frozen_or_run_again_it_costs_at_most_one_weight_gradient_more(stages, count, data) -> None:
    """It costs nothing unless a unit that learns feeds a frozen one: its last weight gradient then hides behind nothing."""
    frozen, again = (data.draw(st.sets(st.sampled_from(list(stages)))) for _ in range(2))
    parts = {unit: weight_factor(frozen=unit in frozen) for unit in stages}
    factors = backward_factors(stages, frozen=frozen, checkpointing=again)
    execution = Execution(schedule="zero-bubble", backward_factors=factors, weight_gradient_factors=parts)
    feeds = Topology(replicas=1, microbatches=count, stages=stages).feeds
    exposed = any(unit not in frozen and behind in frozen for unit, behind in feeds.items())
    assert_no_slower_than_1f1b(stages, count, dict.fromkeys(stages, 1.0), execution, by=max(parts.values()) if exposed else 0.0)


def assert_no_slower_than_1f1b(stages, count: int, stage_s: Mapping[str, float], execution: Execution, by: float = 0.0) -> None:
    """Check that microbatches that take `stage_s` on the stages of each unit take at most `by` longer than under 1F1B."""
    costs = {unit: np.full(count, size * stage_s[unit]) for unit, size in stages.items()}
    topology = Topology(replicas=1, microbatches=count, stages=stages)
    before, after = (
        plan("random", np.arange(count), costs, topology, 0, execution=how).predicted.iteration_s
        for how in (replace(execution, schedule="1f1b"), execution)
    )
    assert after <= (before + by) * (1 + 1e-12)


def test_interleaved_with_one_chunk_is_1f1b() -> None:
    assert build("interleaved", STAGES, range(7)) == build("1f1b", STAGES, range(7))


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("count", [4, 5, 7, 8, 12])
def test_interleaving_divides_the_idle_time_of_one_unit_by_the_chunks(num_stages: int, chunks: int, count: int) -> None:
    idle = step("1f1b", {"llm": num_stages}, count) - 3 * count
    assert idle == pytest.approx(3 * (num_stages - 1))
    assert step("interleaved", {"llm": num_stages}, count, chunks) - 3 * count == pytest.approx(idle / chunks)


@with_examples(60)
@given(topologies, st.integers(1, 13), st.integers(2, 3))
def test_interleaving_equal_microbatches_of_several_units_loses_little_and_of_one_unit_nothing(stages, count, chunks) -> None:
    slack = 1e-9 if len(stages) == 1 else 0.08
    assert step("interleaved", stages, count, chunks) <= (1 + slack) * step("1f1b", stages, count)


def test_interleaving_takes_every_backward_at_once_where_that_is_faster_than_alternating() -> None:
    stages = {"vision": 1, "llm": 3}
    assert step("interleaved", stages, 5, chunks=4) < step("1f1b", stages, 5)


@with_examples(150)
@given(st.sampled_from(SCHEDULES), topologies, st.integers(0, 11), st.integers(1, 3), st.one_of(st.none(), st.integers(1, 9)))
def test_every_stage_runs_everything_once_in_order_and_nothing_waits_for_ever(name, stages, count, chunks, limit) -> None:
    chunks = chunks if name == "interleaved" else 1
    limit = limit if name == "eager" else None
    microbatches = [2 * m + 1 for m in range(count)]
    schedule = build(name, stages, microbatches, chunks=chunks, in_flight=limit)
    assert len(schedule) == sum(stages.values())
    for actions in schedule:
        kinds = [Kind.FORWARD, Kind.BACKWARD] + [Kind.WEIGHT] * (name == "zero-bubble")
        assert len(actions) == len(kinds) * count * chunks
        for kind in kinds:
            for chunk in range(chunks):
                assert [a.microbatch for a in actions if (a.kind, a.chunk) == (kind, chunk)] == microbatches
    assert len(ends(stages, schedule, chunks)) == sum(map(len, schedule))
    assert build(name, stages, microbatches, chunks=chunks, in_flight=limit) == schedule


@with_examples(60)
@given(topologies, st.integers(1, 11), st.integers(1, 9))
def test_what_a_stage_holds_is_bounded_as_its_schedule_promises(stages, count, limit) -> None:
    behind = [stage.num_behind for stage in stage_graph(stages)]
    held = {name: [in_flight(a) for a in build(name, stages, range(count))] for name in ("1f1b", "gpipe", "eager", "zero-bubble")}
    assert held["1f1b"] == [min(b + 1, count) for b in behind]
    assert held["zero-bubble"] == [min(max(behind) + 1, count)] * len(behind)
    assert held["gpipe"] == [count] * len(behind)
    assert held["eager"] == [count if b else 1 for b in behind]
    limited = [in_flight(a) for a in build("eager", stages, range(count), in_flight=limit)]
    longest = max(behind)
    for b, most in zip(behind, limited, strict=True):
        assert most <= min(limit, count) or most == 1
        if b == longest > 0:
            assert most == min(limit, count)
        if limit > longest:
            assert most >= min(b + 1, count)


@pytest.mark.parametrize("name", SCHEDULES)
def test_microbatches_that_are_left_out_leave_no_gap(name: str) -> None:
    renamed = {0: 1, 1: 4, 2: 9}
    schedule = build(name, STAGES, range(3))
    expected = tuple(tuple(Action(kind=a.kind, microbatch=renamed[a.microbatch]) for a in actions) for actions in schedule)
    assert build(name, STAGES, [1, 4, 9]) == expected
    assert build(name, STAGES, []) == ((),) * 8


@pytest.mark.parametrize(
    ("arguments", "options", "rule"),
    [
        (("2f2b", {"llm": 2}, [0]), {}, "no schedule '2f2b'; there are 1f1b, interleaved, gpipe, eager, zero-bubble"),
        (("1f1b", {"llm": 2}, [1, 1]), {}, "runs once"),
        (("1f1b", {"llm": 0}, [0]), {}, "at least one stage"),
        (("1f1b", {"vision": 1}, [0]), {}, "'llm' among them"),
        (("1f1b", {"llm": 1, "vision": 1}, [0]), {}, "pipeline order"),
        (("1f1b", {"llm": 2}, [0]), {"chunks": 2}, "only with 'interleaved', got 2 with '1f1b'"),
        (("interleaved", {"llm": 2}, [0]), {"chunks": 0}, "at least 1"),
        (("eager", {"llm": 2}, [0]), {"in_flight": 0}, "at least 1"),
        (("gpipe", {"llm": 2}, [0]), {"in_flight": 3}, "only for 'eager', got 3 with 'gpipe'"),
    ],
)
def test_nonsense_is_refused(arguments, options, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        build(*arguments, **options)


@with_examples(60)
@given(topologies, st.integers(1, 11), st.integers(0, 9))
def test_more_forwards_ahead_never_slow_equal_microbatches_on_equal_stages_down(stages, count, more) -> None:
    """Behind a slower stage they may: a forward that comes late is then waited for, though a backward could run."""
    limit = max(stage.num_behind for stage in stage_graph(stages)) + 1 + more
    costs = {unit: np.full(count, float(size)) for unit, size in stages.items()}
    topology = Topology(replicas=1, microbatches=count, stages=stages)
    seconds = [
        plan("random", np.arange(count), costs, topology, 0, execution=execution).predicted.iteration_s
        for execution in (Execution(), Execution(schedule="eager", in_flight=limit))
    ]
    assert seconds[1] <= seconds[0] * (1 + 1e-12)
