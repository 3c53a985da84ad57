"""The simulator against arithmetic done by hand and against a slow twin that follows dependencies one by one."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.plan import Microbatch, StepPlan, Topology
from headrace.schedule import Action, Kind, Schedule, Scheduler, one_f_one_b
from reorder_service.planning.simulator import Work, simulate, timeline


def work_of(forward: list[list[list[float]]] | np.ndarray, occupied: list[list[bool]] | None = None) -> Work:
    array = np.array(forward, dtype=np.float64)
    filled = np.ones(array.shape[:2], np.bool_) if occupied is None else np.array(occupied)
    return Work(forward_s=array, occupied=filled)


def slow_ends(forward: np.ndarray, schedule: Schedule) -> dict[tuple[int, int, int], float]:
    """End of every (stage, kind, microbatch) of one replica, by recursion over what it waits for."""
    last = len(schedule) - 1

    @cache
    def end(stage: int, place: int) -> float:
        action = schedule[stage][place]
        own = forward[action.microbatch][stage] * (1 if action.kind == Kind.FORWARD else 2)
        ready = end(stage, place - 1) if place else 0.0
        if action.kind == Kind.FORWARD and stage > 0:
            ready = max(ready, end(stage - 1, schedule[stage - 1].index(action)))
        if action.kind == Kind.BACKWARD and stage < last:
            ready = max(ready, end(stage + 1, schedule[stage + 1].index(action)))
        return ready + own

    return {
        (stage, int(action.kind), action.microbatch): end(stage, place)
        for stage, actions in enumerate(schedule)
        for place, action in enumerate(actions)
    }


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("num_microbatches", [1, 3, 4, 9])
def test_equal_microbatches_take_microbatches_plus_stages_minus_one_rounds(num_stages: int, num_microbatches: int) -> None:
    predicted = simulate(work_of(np.full((2, num_microbatches, num_stages), 0.5)))
    rounds = num_microbatches + num_stages - 1
    assert predicted.iteration_s == pytest.approx(rounds * (0.5 + 1.0))
    assert predicted.bubble == pytest.approx((num_stages - 1) / rounds)
    assert predicted.lower_bound_s == pytest.approx(num_microbatches * 1.5)


def test_two_stages_by_hand() -> None:

    actions = timeline(work_of([[[1, 1], [2, 3]]]))
    rows = zip(actions.stage, actions.kind, actions.microbatch, actions.start_s, actions.end_s, strict=True)
    assert [tuple(float(x) for x in row) for row in rows] == [
        (0, Kind.FORWARD, 0, 0, 1),
        (0, Kind.FORWARD, 1, 1, 3),
        (0, Kind.BACKWARD, 0, 4, 6),
        (0, Kind.BACKWARD, 1, 13, 17),
        (1, Kind.FORWARD, 0, 1, 2),
        (1, Kind.BACKWARD, 0, 2, 4),
        (1, Kind.FORWARD, 1, 4, 7),
        (1, Kind.BACKWARD, 1, 7, 13),
    ]
    predicted = simulate(work_of([[[1, 1], [2, 3]]]))
    assert predicted.iteration_s == 17
    assert predicted.lower_bound_s == 12  # stage 1: 3 * (1 + 3)
    assert predicted.bubble == pytest.approx(1 - (9 + 12) / (2 * 17))


def test_the_slowest_replica_decides_and_the_others_wait_for_it() -> None:
    predicted = simulate(work_of([[[1.0]], [[3.0]]]))
    assert (predicted.iteration_s, predicted.lower_bound_s) == (9, 9)
    assert predicted.bubble == pytest.approx(1 - 12 / 18)


def test_empty_microbatches_take_no_time_wherever_they_stand() -> None:
    rng = np.random.default_rng(0)
    full = rng.random((1, 3, 4))
    padded = np.zeros((1, 6, 4))
    padded[:, [0, 2, 5]] = full
    occupied = [[True, False, True, False, False, True]]
    assert simulate(work_of(padded, occupied)) == simulate(work_of(full))
    assert set(timeline(work_of(padded, occupied)).microbatch) == {0, 2, 5}


def test_nothing_to_do_takes_no_time() -> None:
    for work in (work_of(np.zeros((2, 3, 2))), work_of(np.zeros((2, 3, 2)), [[False] * 3] * 2)):
        predicted = simulate(work)
        assert (predicted.iteration_s, predicted.bubble, predicted.lower_bound_s) == (0, 0, 0)
    assert timeline(work).start_s.size == 0


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(1, 3), st.integers(1, 7), st.integers(1, 5), st.integers(0, 2**32), st.booleans())
def test_it_agrees_with_the_slow_twin(replicas: int, microbatches: int, stages: int, seed: int, holes: bool) -> None:
    rng = np.random.default_rng(seed)
    forward = rng.lognormal(0, 1.5, (replicas, microbatches, stages))
    occupied = rng.random((replicas, microbatches)) < 0.7 if holes else np.ones((replicas, microbatches), np.bool_)
    work = Work(forward_s=np.where(occupied[:, :, None], forward, 0.0), occupied=occupied)
    expected = {
        (r, *key): end
        for r in range(replicas)
        for key, end in slow_ends(forward[r], one_f_one_b(stages, np.flatnonzero(occupied[r]).tolist())).items()
    }
    actions = timeline(work)
    keys = zip(*(c.tolist() for c in (actions.replica, actions.stage, actions.kind, actions.microbatch)), strict=True)
    assert dict(zip(keys, actions.end_s.tolist(), strict=True)) == expected

    predicted = simulate(work)
    assert predicted.iteration_s == max(expected.values(), default=0.0)
    assert predicted.lower_bound_s <= predicted.iteration_s * (1 + 1e-12)
    assert 0 <= predicted.bubble < 1
    for r in range(replicas):
        for s in range(stages):
            here = (actions.replica == r) & (actions.stage == s)
            assert (actions.start_s[here][1:] >= actions.end_s[here][:-1]).all(), "a stage does one thing at a time"


def _backward_first(num_stages: int, microbatches: range) -> Schedule:
    actions = tuple(Action(kind=kind, microbatch=m) for m in microbatches for kind in (Kind.BACKWARD, Kind.FORWARD))
    return (actions,) * num_stages


def _all_forward_then_all_backward(num_stages: int, microbatches: range) -> Schedule:
    return (tuple(Action(kind=kind, microbatch=m) for kind in Kind for m in microbatches),) * num_stages


def test_a_schedule_that_waits_for_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="waits for itself"):
        simulate(work_of(np.ones((1, 2, 2))), _backward_first)


@pytest.mark.parametrize("scheduler", [_all_forward_then_all_backward, one_f_one_b])
def test_any_schedule_can_be_timed(scheduler: Scheduler) -> None:
    forward = np.random.default_rng(3).random((1, 5, 3))
    assert simulate(work_of(forward), scheduler).iteration_s == max(slow_ends(forward[0], scheduler(3, range(5))).values())


def test_the_work_of_a_plan_is_summed_per_unit_and_spread_over_its_stages() -> None:
    topology = Topology(replicas=1, microbatches=3, stages={"encoder": 1, "llm": 2})
    microbatches = (
        Microbatch(units={"encoder": (7, 9), "llm": (7,)}),
        Microbatch(units={"encoder": (), "llm": (9,)}),
        Microbatch(units={"encoder": (), "llm": ()}),
    )
    plan = StepPlan(strategy="entrain", seed=0, topology=topology, replicas=(microbatches,))
    costs = {"encoder": np.array([1.0, 2.0]), "llm": np.array([10.0, 30.0])}
    work = Work.of_plan(plan, np.array([9, 7]), costs)
    assert work.forward_s.tolist() == [[[3, 15, 15], [0, 5, 5], [0, 0, 0]]]
    assert work.occupied.tolist() == [[True, True, False]]
