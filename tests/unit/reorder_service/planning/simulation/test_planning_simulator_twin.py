"""The simulator against its slow twin, over plans of every shape."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan import Topology
from headrace.reorder_service.planning.batch import Batch, Slots, make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.simulation.makespan import makespan
from headrace.reorder_service.planning.simulation.simulator import Work, peak_memory, simulate, timeline
from headrace.reorder_service.planning.simulation.timed_schedule import schedule_table
from headrace.reorder_service.planning.simulation.work import link_inputs, lower_bound, parts_of_slots
from tests.examples import with_examples
from tests.unit.reorder_service.planning.simulator_world import Twin, keys_of, plans


@pytest.mark.slow
@with_examples(250)
@given(plans())
def test_it_agrees_with_the_slow_twin(plan: tuple[Batch, Slots]) -> None:
    batch, slots = plan
    work, twin = Work.of(batch, slots), Twin(batch, slots)
    expected = twin.times()
    actions, predicted = timeline(work), simulate(work)
    keys = keys_of(actions)
    assert len(keys) == len(expected)
    times = [expected[key] for key in keys]
    np.testing.assert_allclose(np.stack([actions.start_s, actions.end_s], axis=1), times, rtol=1e-9, atol=1e-12)
    over_s = [end_s + twin.exchange_s(stage)[1] for stage, end_s in zip(actions.stage, actions.end_s, strict=True)]
    assert predicted.iteration_s == max(over_s), "the fast way to the time of a step and the full replay agree"
    np.testing.assert_allclose(peak_memory(work), twin.peaks(), rtol=1e-9, atol=1e-12)

    busy = sum(end - start for start, end in times)
    capacity = np.dot(batch.unit_replicas, list(batch.topology.stages.values())) * predicted.iteration_s
    assert predicted.bubble == pytest.approx(1 - busy / capacity if capacity else 0.0, abs=1e-9)


@pytest.mark.slow
@with_examples(120)
@given(plans(split=False))
def test_without_split_backward_it_agrees_with_the_twin_or_both_find_the_plan_impossible(plan: tuple[Batch, Slots]) -> None:
    batch, slots = plan
    work = Work.of(batch, slots)
    try:
        expected = Twin(batch, slots).times()
    except RecursionError:
        with pytest.raises(ValueError, match="wait for itself"):
            simulate(work)
        return
    actions = timeline(work)
    times = [expected[key] for key in keys_of(actions)]
    np.testing.assert_allclose(np.stack([actions.start_s, actions.end_s], axis=1), times, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(peak_memory(work), Twin(batch, slots).peaks(), rtol=1e-9, atol=1e-12)


@with_examples(120)
@given(plans())
def test_no_plan_beats_the_lower_bound(plan: tuple[Batch, Slots]) -> None:
    batch, slots = plan
    predicted = simulate(Work.of(batch, slots))
    assert predicted.lower_bound_s == pytest.approx(lower_bound(batch), rel=1e-12)
    assert predicted.iteration_s >= predicted.lower_bound_s


@with_examples(120)
@given(plans())
def test_the_critical_path_leads_without_a_gap_from_the_start_of_the_step_to_its_end(plan: tuple[Batch, Slots]) -> None:
    batch, slots = plan
    actions, twin = timeline(Work.of(batch, slots)), Twin(batch, slots)
    path = np.flatnonzero(actions.critical).tolist()
    keys = keys_of(actions)
    # not the one that ends first: a short action may end before a longer one that passed parts of its samples on to it
    assert any(actions.start_s[a] == twin.exchange_s(actions.stage[a])[0] for a in path)
    over_s = [end_s + twin.exchange_s(stage)[1] for stage, end_s in zip(actions.stage, actions.end_s, strict=True)]
    assert max(over_s[a] for a in path) == max(over_s)
    for a in path:
        if actions.start_s[a] == twin.exchange_s(actions.stage[a])[0]:
            continue
        waited = dict(twin.neighbours(keys[a]))
        causes = [
            b
            for b in path
            if actions.end_s[b] + waited.get(keys[b], 0.0) == pytest.approx(actions.start_s[a], rel=1e-9)
            and (keys[b] in waited or keys[b][:2] == keys[a][:2])
        ]
        assert causes, "every action of the path starts because of another one on it"


@with_examples(60)
@given(plans())
def test_a_stage_does_one_thing_at_a_time_and_gives_back_all_that_it_took(plan: tuple[Batch, Slots]) -> None:
    batch, slots = plan
    work = Work.of(batch, slots)
    actions, peaks = timeline(work), peak_memory(work)
    assert keys_of(actions) == sorted(keys_of(actions), key=lambda key: key[:2])
    for r in range(batch.most_replicas):
        for s in range(batch.topology.num_stages):
            here = (actions.replica == r) & (actions.stage == s)
            assert (actions.start_s[here][1:] >= actions.end_s[here][:-1]).all()
            if here.any():
                assert actions.memory_after[here][-1] == pytest.approx(0, abs=1e-9)
                assert actions.memory_after[here].max() == peaks[r, s]


@with_examples(60)
@given(plans())
def test_the_kernel_for_one_replica_is_the_step_of_one_replica(plan: tuple[Batch, Slots]) -> None:
    batch, slots = plan
    topology, count = batch.topology, batch.topology.microbatches
    alone = Topology(replicas=1, microbatches=count, stages=topology.stages)
    how = Execution(schedule=batch.execution.schedule, chunks=batch.execution.chunks, in_flight=batch.execution.in_flight)
    costs = dict(zip(batch.units, batch.costs, strict=True))
    work = Work.of(make_batch(batch.sample_ids, costs, alone, 0, execution=how), np.tile(slots[0] % count, (len(slots), 1)))
    filled = np.flatnonzero(work.occupied[0])
    table = schedule_table(topology.stages, how, filled.size)
    seconds = makespan(work.seconds[0], filled, table)
    assert seconds == pytest.approx(timeline(work).end_s.max(), rel=1e-12)
    assert schedule_table(topology.stages, how, filled.size) is table


@with_examples(100)
@given(st.integers(0, 12), st.integers(1, 5), st.integers(0, 2**32))
def test_the_inputs_of_a_link_equal_the_slow_twins(count: int, num_slots: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    source, target = rng.integers(0, num_slots, (2, count))
    seconds, early = rng.random((2, count))
    offsets, slots, slot_seconds = np.zeros(num_slots + 1, np.int64), np.zeros(count, np.int64), np.zeros(count)
    link_inputs(source, target, seconds, 0.5, early, offsets, slots, slot_seconds)
    for t in range(num_slots):
        found = slice(offsets[t], offsets[t + 1])
        expected = {}
        for s in set(source[target == t].tolist()):
            sent = (source == s) & (target == t)
            expected[s] = 0.5 + seconds[sent].sum() - early[sent].min()
        assert dict(zip(slots[found].tolist(), slot_seconds[found].tolist(), strict=True)) == pytest.approx(expected)


@with_examples(100)
@given(st.integers(0, 14), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32))
def test_the_parts_of_slots_equal_the_slow_twins(count: int, replicas: int, num_microbatches: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_slots = replicas * num_microbatches
    slots, others = rng.integers(0, num_slots, (2, count))
    seconds = rng.random(count)
    overlap, later = parts_of_slots(slots, others, seconds, num_slots, num_microbatches)
    index = others % num_microbatches
    for slot in range(num_slots):
        parts = [seconds[(slots == slot) & (index == k)].sum() for k in range(num_microbatches)]
        assert overlap[slot] == pytest.approx(sum(parts) - max(parts))
        for i in np.flatnonzero(slots == slot):
            assert later[i] == pytest.approx(sum(parts[index[i] + 1 :]))
