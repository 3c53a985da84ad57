"""Time of one replica under a schedule, the search for a better order, and graded microbatches."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan import Topology
from headrace.reorder_service.planning.batch import make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.search.arrangement import arrange
from headrace.reorder_service.planning.seeding import xorshift_state
from headrace.reorder_service.planning.simulation import makespan as makespan_module
from headrace.reorder_service.planning.simulation import timed_schedule
from headrace.reorder_service.planning.simulation.makespan import best_grades, best_simple_order, improve_order, makespan
from headrace.reorder_service.planning.simulation.simulator import simulate
from headrace.reorder_service.planning.simulation.timed_schedule import schedule_table
from headrace.reorder_service.planning.simulation.work import Work
from tests.examples import with_examples

STAGES = {"encoder": 2, "llm": 2}


def replica(seed: int, count: int, num_stages: int) -> np.ndarray:
    return actions(np.random.default_rng(seed).lognormal(0, 0.7, (count, num_stages)))


def actions(forward: np.ndarray, execution: Execution = Execution()) -> np.ndarray:  # noqa: B008
    """Seconds by kind of actions with such forwards."""
    return forward[..., None] * np.array(execution.factors("llm"))


@with_examples(40)
@given(
    count=st.integers(1, 7),
    execution=st.sampled_from([Execution(), Execution(schedule="zero-bubble"), Execution(schedule="interleaved", chunks=2)]),
    stages=st.sampled_from([{"llm": 1}, STAGES, {"vision": 2, "audio": 1, "llm": 2, "generator": 1}]),
    seed=st.integers(0, 1000),
)
def test_makespan_is_what_the_simulator_says(count: int, execution: Execution, stages: dict[str, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs = {unit: rng.lognormal(0, 1, count) for unit in stages}
    topology = Topology(replicas=1, microbatches=count, stages=stages)
    batch = make_batch(np.arange(count), costs, topology, 0, execution=execution)
    order = rng.permutation(count)
    slots = np.broadcast_to(np.argsort(order), batch.costs.shape)  # microbatch order[p], sample order[p], runs at p
    per_action = np.array(list(stages.values())) * execution.chunks
    forward = np.repeat(batch.costs.T / per_action, list(stages.values()), axis=1)
    seconds = makespan(actions(forward, execution), order, schedule_table(stages, execution, count))
    assert seconds == pytest.approx(simulate(Work.of(batch, slots)).iteration_s)


@with_examples(30)
@given(count=st.integers(1, 8), seed=st.integers(0, 1000))
def test_the_search_only_improves_and_keeps_every_microbatch(count: int, seed: int) -> None:
    seconds = replica(seed, count, 4)
    table = schedule_table(STAGES, Execution(), count)
    start = np.random.default_rng(seed).permutation(count)
    before = makespan(seconds, start, table)
    order = start.copy()
    after = improve_order(seconds, order, table, 200, xorshift_state(seed))
    assert sorted(order) == list(range(count))
    assert after == makespan(seconds, order, table) <= before

    again = start.copy()
    assert improve_order(seconds, again, table, 200, xorshift_state(seed)) == after
    assert (again == order).all()


def test_the_search_finds_the_best_order_of_few_microbatches() -> None:
    table = schedule_table(STAGES, Execution(), 5)
    for seed in range(5):
        seconds = replica(seed, 5, 4)
        every = (np.array(order) for order in itertools.permutations(range(5)))
        optimum = min(makespan(seconds, order, table) for order in every)
        assert improve_order(seconds, np.arange(5), table, 2000, xorshift_state(0)) <= 1.02 * optimum


@with_examples(30)
@given(count=st.integers(0, 7), seed=st.integers(0, 1000))
def test_opening_takes_the_best_of_three_simple_orders(count: int, seed: int) -> None:
    seconds = replica(seed, 9, 4)
    filled = np.sort(np.random.default_rng(seed).permutation(9)[:count])
    sizes = np.round(seconds[..., 0].sum(axis=1))  # ties
    table = schedule_table(STAGES, Execution(), count)
    rising = sorted(filled.tolist(), key=lambda k: (sizes[k], k))
    simple = [rising, rising[::-1], [*rising[:1], *rising[:0:-1]]]
    times = [makespan(seconds, np.array(order, np.int64), table) for order in simple]
    order = best_simple_order(seconds, sizes, filled, table)
    assert sorted(order) == filled.tolist()
    assert makespan(seconds, order, table) == min(times)


def test_grades_are_the_fastest_of_all_pairs_of_slopes() -> None:
    first, growth = np.array([0.2, 0.5, 1.0]), np.array([1.2, 1.5])
    forward, count = np.array([3.0, 1.0, 2.0]), 6
    stages = {"encoder": 1, "llm": 2}
    table = schedule_table(stages, Execution(), count)

    def seconds(grades: np.ndarray) -> float:
        loads = grades[:, None] / grades.sum() * forward
        return makespan(actions(loads), np.arange(count), table)

    k = np.arange(count)
    every = [
        np.minimum(1, np.minimum(front * rising**k, rear * falling ** (count - 1 - k)))
        for front, rising, rear, falling in itertools.product(first, growth, first, growth)
    ]
    grades = best_grades(actions(forward), table, count, first, growth, forward[:2], np.ones(2, np.int64), np.inf)
    assert seconds(grades) == pytest.approx(min(map(seconds, every)))
    assert seconds(grades) < seconds(np.ones(count))


def test_arranging_shortens_a_step_of_unequal_microbatches() -> None:
    rng = np.random.default_rng(2)
    costs = {unit: rng.pareto(1.5, 32) for unit in STAGES}
    batch = make_batch(np.arange(32), costs, Topology(replicas=2, microbatches=16, stages=STAGES), 0)
    slot, table = np.arange(32), schedule_table(STAGES, Execution(), 16)
    work = Work.of(batch, np.broadcast_to(slot, (2, 32)))
    sizes = batch.loads(np.broadcast_to(slot, (2, 32))).sum(axis=2)
    simple = [
        makespan(seconds, best_simple_order(seconds, size, np.arange(16), table), table)
        for seconds, size in zip(work.seconds, sizes, strict=True)
    ]
    arranged = simulate(Work.of(batch, np.broadcast_to(arrange(batch, slot), (2, 32)))).iteration_s
    assert arranged < 0.97 * max(simple)


def test_the_columns_of_a_table_are_those_of_the_replay() -> None:
    assert (makespan_module._STAGE, makespan_module._KIND) == (timed_schedule.STAGE, timed_schedule.KIND)
    assert (makespan_module._POSITION, makespan_module._WAITS) == (timed_schedule.POSITION, timed_schedule.WAITS)


def test_arranging_moves_whole_microbatches_and_puts_empty_ones_last() -> None:
    rng = np.random.default_rng(0)
    costs = {"encoder": rng.lognormal(0, 1, 20), "llm": rng.lognormal(0, 1, 20)}
    batch = make_batch(np.arange(20), costs, Topology(replicas=2, microbatches=6, stages=STAGES), 0)
    slot = np.array([0, 2, 3, 5, 7, 7, 11, 10, 0, 2, 3, 5, 7, 7, 11, 10, 0, 2, 3, 5])
    arranged = arrange(batch, slot)
    assert len(set(zip(slot, arranged, strict=True))) == len(set(slot))
    assert (arranged // 6 == slot // 6).all()
    assert set(arranged) == {0, 1, 2, 3, 6, 7, 8}

    def seconds(of: np.ndarray) -> float:
        return simulate(Work.of(batch, np.broadcast_to(of, batch.costs.shape))).iteration_s

    assert seconds(arranged) <= seconds(slot)
