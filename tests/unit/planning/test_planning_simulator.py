"""The simulator against arithmetic done by hand and against a slow twin that follows every sample through the pipeline."""

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.plan import Topology
from headrace.schedule import SCHEDULES, Kind, build
from reorder_service.planning.batch import Batch, Slots, make_batch
from reorder_service.planning.execution import Execution
from reorder_service.planning.makespan import makespan
from reorder_service.planning.replay import schedule_table
from reorder_service.planning.simulator import Timeline, Work, peak_memory, simulate, timeline
from reorder_service.planning.work import link_inputs, lower_bound

Key = tuple[int, int, int, int, int]
"""Replica, stage, kind, microbatch, chunk."""


def batch_of(
    costs: Mapping[str, Sequence[float]],
    stages: Mapping[str, int],
    *,
    replicas: int = 1,
    microbatches: int,
    memory: Mapping[str, Sequence[float]] | None = None,
    bytes_: Mapping[str, Sequence[float]] | None = None,
    **execution: object,
) -> Batch:
    def columns(of):
        return None if of is None else {unit: np.array(values, dtype=np.float64) for unit, values in of.items()}

    count = len(next(iter(costs.values())))
    topology = Topology(replicas=replicas, microbatches=microbatches, stages=dict(stages))
    return make_batch(
        np.arange(count), columns(costs), topology, 0, execution=Execution(**execution), memory=columns(memory),
        transfer_bytes=columns(bytes_),
    )  # fmt: skip


def equal(stages: Mapping[str, int], *, microbatches: int, replicas: int = 1, **execution: object) -> tuple[Batch, Slots]:
    """One sample per microbatch that takes a second per stage of every unit."""
    count = replicas * microbatches
    costs = {unit: [float(size)] * count for unit, size in stages.items()}
    batch = batch_of(costs, stages, replicas=replicas, microbatches=microbatches, **execution)
    return batch, np.tile(np.arange(count), (len(stages), 1))


def rows(actions: Timeline) -> list[tuple[int, str, float, float]]:
    """(stage, action, start, end)"""
    columns = zip(actions.stage, actions.kind, actions.microbatch, actions.start_s, actions.end_s, strict=True)
    return [(int(s), f"{'FB'[kind]}{m}", float(start), float(end)) for s, kind, m, start, end in columns]


class Twin:
    """One step, action by action and sample by sample, with nothing taken from the simulator but the schedule."""

    def __init__(self, batch: Batch, slots: Slots) -> None:
        self.batch, self.how, self.shape = batch, batch.execution, batch.topology
        self.units, self.sizes = list(self.shape.stages), list(self.shape.stages.values())
        self.first = [sum(self.sizes[:u]) for u in range(len(self.units))]
        self.place = [[divmod(int(slot), self.shape.microbatches) for slot in row] for row in slots]
        samples = range(slots.shape[1])
        crosses = any(self.place[u][i][0] != self.place[0][i][0] for u in range(len(self.units)) for i in samples)
        self.runs = []
        for r in range(self.shape.replicas):
            held = {k for row in self.place for replica, k in row if crosses or replica == r}
            self.runs.append(sorted(held))
        self.back = [
            [(replica, self.place[-1][i][1] if self.how.split_backward else k) for i, (replica, k) in enumerate(row)]
            for row in self.place
        ]
        self.schedule = [
            build(
                self.how.schedule, self.shape.stages, runs, chunks=self.how.chunks, in_flight=self.how.in_flight
            )
            for runs in self.runs
        ]  # fmt: skip

    def unit_of(self, stage: int) -> int:
        return max(u for u, first in enumerate(self.first) if first <= stage)

    def samples(self, unit: int, kind: int, replica: int, microbatch: int) -> list[int]:
        where = (self.place, self.back)[kind][unit]
        return [i for i, place in enumerate(where) if place == (replica, microbatch)]

    def factor(self, unit: int) -> float:
        return self.how.backward_factor(self.units[unit])

    def seconds(self, key: Key) -> float:
        replica, stage, kind, microbatch, _ = key
        unit = self.unit_of(stage)
        total = sum(self.batch.costs[unit][i] for i in self.samples(unit, kind, replica, microbatch))
        return total * (self.factor(unit) if kind else 1.0) / (self.sizes[unit] * self.how.chunks)

    def transfer(self, unit: int, kind: int, samples: list[int]) -> float:
        """Of what `unit` passes on of the samples, or of their gradients back to it."""
        if not samples or (kind and self.factor(unit) == 0):
            return 0.0
        return self.how.latency_s + sum(self.batch.transfer_bytes[unit][i] for i in samples) / self.how.bytes_per_s

    def neighbours(self, key: Key) -> list[tuple[Key, float]]:
        """What the action waits for, and the time on the way."""
        replica, stage, kind, k, chunk = key
        unit = self.unit_of(stage)
        index, size, last = stage - self.first[unit], self.sizes[unit], self.how.chunks - 1
        mine = self.samples(unit, kind, replica, k)
        hop = self.transfer(unit, kind, mine)
        step, edge = (-1, 0) if kind == Kind.FORWARD else (1, size - 1)
        if index != edge:
            return [((replica, stage + step, kind, k, chunk), hop)]
        if chunk != (0 if kind == Kind.FORWARD else last):
            return [((replica, stage - step * (size - 1), kind, k, chunk + step), hop if size > 1 else 0.0)]
        llm = self.units.index("llm")
        found = []
        for other in range(len(self.units)):
            in_front, behind = (other, unit) if kind == Kind.FORWARD else (unit, other)
            if behind == max(in_front + 1, llm) and behind < len(self.units):
                for source, k_source in {(self.place, self.back)[kind][other][i] for i in mine}:
                    shared = [i for i in mine if (self.place, self.back)[kind][other][i] == (source, k_source)]
                    exit_stage = self.first[other] + (self.sizes[other] - 1 if kind == Kind.FORWARD else 0)
                    exit_chunk = last if kind == Kind.FORWARD else 0
                    found.append(((source, exit_stage, kind, k_source, exit_chunk), self.transfer(in_front, kind, shared)))
        if kind == Kind.BACKWARD and unit == len(self.units) - 1:
            found.append(((replica, stage, 0, k, chunk), 0.0))
        return found

    def times(self) -> dict[Key, tuple[float, float]]:
        """Start and end of every action. Raises RecursionError where they wait for each other."""
        before: dict[Key, Key | None] = {}
        for r, schedule in enumerate(self.schedule):
            for s, actions in enumerate(schedule):
                keys = [(r, s, int(a.kind), a.microbatch, a.chunk) for a in actions]
                before |= {key: keys[i - 1] if i else None for i, key in enumerate(keys)}
        open_: set[Key] = set()

        @cache
        def times(key: Key) -> tuple[float, float]:
            if key in open_:
                raise RecursionError(f"{key} waits for itself")
            open_.add(key)
            previous = before[key]
            ready = [0.0 if previous is None else times(previous)[1]]
            ready += [times(needed)[1] + hop for needed, hop in self.neighbours(key)]
            open_.remove(key)
            return max(ready), max(ready) + self.seconds(key)

        return {key: times(key) for key in before}

    def peaks(self) -> np.ndarray:
        """(D, S) by adding up what every sample keeps."""
        most = np.zeros((self.shape.replicas, self.shape.num_stages))
        for r, schedule in enumerate(self.schedule):
            for s, actions in enumerate(schedule):
                unit, held = self.unit_of(s), 0.0
                for a in actions:
                    size = sum(self.batch.memory[unit][i] for i in self.samples(unit, a.kind, r, a.microbatch))
                    held += (1 if a.kind == Kind.FORWARD else -1) * size * (self.factor(unit) > 0)
                    most[r, s] = max(most[r, s], held / (self.sizes[unit] * self.how.chunks))
        return most


@st.composite
def plans(draw: st.DrawFn, split: bool = True) -> tuple[Batch, Slots]:
    """A batch on one to five units, under any schedule, with its samples anywhere that a plan may put them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    stages = {f"e{i}": draw(st.integers(1, 3)) for i in range(draw(st.integers(0, 3)))} | {"llm": draw(st.integers(1, 3))}
    if draw(st.booleans()):
        stages["generator"] = draw(st.integers(1, 2))
    replicas, microbatches, count = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 12))
    name = draw(st.sampled_from(SCHEDULES))
    defers, crosses, timed = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())

    def column() -> np.ndarray:
        return rng.lognormal(0, 1.5, count) * (rng.random(count) < 0.8)

    batch = batch_of(
        {unit: column() for unit in stages},
        stages,
        replicas=replicas,
        microbatches=microbatches,
        memory={unit: column() for unit in stages} if draw(st.booleans()) else None,
        bytes_={unit: column() for unit in stages},
        schedule=name,
        chunks=draw(st.integers(1, 3)) if name == "interleaved" else 1,
        in_flight=draw(st.integers(1, 6)) if name == "eager" and draw(st.booleans()) else None,
        backward={unit: draw(st.sampled_from([0.0, 1.0, 2.0])) for unit in stages} if draw(st.booleans()) else {},
        split_backward=split,
        latency_s=0.3 if timed and draw(st.booleans()) else 0.0,
        bytes_per_s=4.0 if timed else np.inf,
    )
    index = rng.integers(0, microbatches, (len(stages), count)) if defers else rng.integers(0, microbatches, (1, count))
    index = np.sort(np.broadcast_to(index, (len(stages), count)), axis=0)
    replica = rng.integers(0, replicas, (len(stages) if crosses else 1, count))
    return batch, replica * microbatches + index


def keys_of(actions: Timeline) -> list[Key]:
    columns = (actions.replica, actions.stage, actions.kind, actions.microbatch, actions.chunk)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@settings(derandomize=True, deadline=None, max_examples=250)
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
    assert predicted.iteration_s == actions.end_s.max(), "the fast way to the time of a step and the full replay agree"
    np.testing.assert_allclose(peak_memory(work), twin.peaks(), rtol=1e-9, atol=1e-12)

    busy = sum(end - start for start, end in times)
    capacity = batch.topology.replicas * batch.topology.num_stages * predicted.iteration_s
    assert predicted.bubble == pytest.approx(1 - busy / capacity if capacity else 0.0, abs=1e-9)


@settings(derandomize=True, deadline=None, max_examples=120)
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


@settings(derandomize=True, deadline=None, max_examples=120)
@given(plans())
def test_no_plan_beats_the_lower_bound(plan: tuple[Batch, Slots]) -> None:
    batch, slots = plan
    predicted = simulate(Work.of(batch, slots))
    assert predicted.lower_bound_s == pytest.approx(lower_bound(batch), rel=1e-12)
    assert predicted.iteration_s >= predicted.lower_bound_s


@settings(derandomize=True, deadline=None, max_examples=120)
@given(plans())
def test_the_critical_path_leads_without_a_gap_from_the_start_of_the_step_to_its_end(plan: tuple[Batch, Slots]) -> None:
    batch, slots = plan
    actions, twin = timeline(Work.of(batch, slots)), Twin(batch, slots)
    on_path = np.flatnonzero(actions.critical)
    keys = keys_of(actions)
    # of equal times, the one that waits comes later; actions without length make such ties
    path = sorted(on_path.tolist(), key=lambda a: (actions.end_s[a], actions.start_s[a]))
    assert actions.start_s[path].min() == 0
    assert actions.end_s[path].max() == actions.end_s.max()
    for a in path:
        if actions.start_s[a] == 0:
            continue
        waited = dict(twin.neighbours(keys[a]))
        causes = [
            b
            for b in path
            if actions.end_s[b] + waited.get(keys[b], 0.0) == pytest.approx(actions.start_s[a], rel=1e-9)
            and (keys[b] in waited or keys[b][:2] == keys[a][:2])
        ]
        assert causes, "every action of the path starts because of another one on it"


@settings(derandomize=True, deadline=None, max_examples=60)
@given(plans())
def test_a_stage_does_one_thing_at_a_time_and_gives_back_all_that_it_took(plan: tuple[Batch, Slots]) -> None:
    batch, slots = plan
    work = Work.of(batch, slots)
    actions, peaks = timeline(work), peak_memory(work)
    assert keys_of(actions) == sorted(keys_of(actions), key=lambda key: key[:2])
    for r in range(batch.topology.replicas):
        for s in range(batch.topology.num_stages):
            here = (actions.replica == r) & (actions.stage == s)
            assert (actions.start_s[here][1:] >= actions.end_s[here][:-1]).all()
            if here.any():
                assert actions.memory_after[here][-1] == pytest.approx(0, abs=1e-9)
                assert actions.memory_after[here].max() == peaks[r, s]


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 3, 4, 9])
def test_equal_microbatches_take_microbatches_plus_stages_minus_one_rounds(num_stages: int, microbatches: int) -> None:
    predicted = simulate(Work.of(*equal({"llm": num_stages}, microbatches=microbatches, replicas=2)))
    rounds = microbatches + num_stages - 1
    assert predicted.iteration_s == pytest.approx(3 * rounds)
    assert predicted.bubble == pytest.approx((num_stages - 1) / rounds)
    assert predicted.lower_bound_s == max(3 * microbatches, 3 * num_stages)


def test_two_stages_by_hand() -> None:
    batch = batch_of({"encoder": [1, 2], "llm": [1, 3]}, {"encoder": 1, "llm": 1}, microbatches=2)
    work = Work.of(batch, np.array([[0, 1], [0, 1]]))
    actions = timeline(work)
    assert rows(actions) == [
        (0, "F0", 0, 1), (0, "F1", 1, 3), (0, "B0", 4, 6), (0, "B1", 13, 17),
        (1, "F0", 1, 2), (1, "B0", 2, 4), (1, "F1", 4, 7), (1, "B1", 7, 13),
    ]  # fmt: skip
    assert actions.critical.tolist() == [True, False, False, True, True, True, True, True]
    predicted = simulate(work)
    assert predicted.iteration_s == 17
    assert predicted.lower_bound_s == 15  # sample 1: there and back, 3 * (2 + 3); the llm's work is 3 * 4
    assert predicted.bubble == pytest.approx(1 - (9 + 12) / (2 * 17))


def test_encoders_run_side_by_side_and_the_llm_waits_for_the_slower_one() -> None:
    batch = batch_of({"vision": [4], "audio": [1], "llm": [2]}, {"vision": 2, "audio": 1, "llm": 1}, microbatches=1)
    work = Work.of(batch, np.zeros((3, 1), np.int64))
    assert rows(timeline(work)) == [
        (0, "F0", 0, 2), (0, "B0", 14, 18),
        (1, "F0", 2, 4), (1, "B0", 10, 14),
        (2, "F0", 0, 1), (2, "B0", 10, 12),
        (3, "F0", 4, 6), (3, "B0", 6, 10),
    ]  # fmt: skip
    assert simulate(work).iteration_s == lower_bound(batch) == 18
    assert not timeline(work).critical[4:6].any()


def test_a_transfer_takes_its_latency_and_its_bytes() -> None:
    batch = batch_of(
        {"encoder": [1.0], "llm": [2.0]}, {"encoder": 1, "llm": 2}, microbatches=1, bytes_={"encoder": [8], "llm": [2]},
        latency_s=0.5, bytes_per_s=4.0,
    )  # fmt: skip
    assert rows(timeline(Work.of(batch, np.zeros((2, 1), np.int64)))) == [
        (0, "F0", 0, 1), (0, "B0", 14, 16),
        (1, "F0", 3.5, 4.5), (1, "B0", 9.5, 11.5),
        (2, "F0", 5.5, 6.5), (2, "B0", 6.5, 8.5),
    ]  # fmt: skip


def test_nothing_is_sent_back_to_a_frozen_encoder_and_it_keeps_nothing() -> None:
    batch = batch_of(
        {"encoder": [1.0], "llm": [1.0]}, {"encoder": 1, "llm": 1}, microbatches=1, latency_s=0.5, backward={"encoder": 0.0}
    )
    work = Work.of(batch, np.zeros((2, 1), np.int64))
    assert simulate(work).iteration_s == 1 + 0.5 + 1 + 2
    assert peak_memory(work).tolist() == [[0, 1]]


def test_the_slowest_replica_decides_and_the_others_wait_for_it() -> None:
    predicted = simulate(Work.of(batch_of({"llm": [1, 3]}, {"llm": 1}, replicas=2, microbatches=1), np.array([[0, 1]])))
    assert (predicted.iteration_s, predicted.lower_bound_s) == (9, 9)
    assert predicted.bubble == pytest.approx(1 - 12 / 18)


def test_a_deferred_sample_goes_back_apart_from_its_microbatch_or_holds_it_up() -> None:
    # Two samples are encoded in microbatch 0, the second goes through the llm in microbatch 1.
    costs, slots = {"encoder": [1.0, 1.0], "llm": [1.0, 1.0]}, np.array([[0, 0], [0, 1]])
    stages = {"encoder": 1, "llm": 1}
    split = rows(timeline(Work.of(batch_of(costs, stages, microbatches=2), slots)))
    assert split == [
        (0, "F0", 0, 2), (0, "F1", 2, 2), (0, "B0", 5, 7), (0, "B1", 8, 10),
        (1, "F0", 2, 3), (1, "B0", 3, 5), (1, "F1", 5, 6), (1, "B1", 6, 8),
    ]  # fmt: skip
    whole = rows(timeline(Work.of(batch_of(costs, stages, microbatches=2, split_backward=False), slots)))
    assert whole[:4] == [(0, "F0", 0, 2), (0, "F1", 2, 2), (0, "B0", 8, 12), (0, "B1", 12, 12)]


def test_deferral_beyond_the_warm_up_needs_split_backward() -> None:
    # Without it the encoder's first backward needs the llm's third, which needs a forward that the encoder runs only after it.
    costs, slots = {"encoder": [1.0] * 3, "llm": [1.0] * 3}, np.array([[0, 1, 2], [2, 1, 2]])
    stages = {"encoder": 1, "llm": 1}
    whole = Work.of(batch_of(costs, stages, microbatches=3, split_backward=False), slots)
    for act in (simulate, timeline):
        with pytest.raises(ValueError, match=r"makes schedule '1f1b' wait for itself.*split the backward"):
            act(whole)
    ahead = Work.of(batch_of(costs, stages, microbatches=3, split_backward=False, schedule="eager"), slots)
    assert simulate(ahead).iteration_s > 0
    assert simulate(Work.of(batch_of(costs, stages, microbatches=3), slots)).iteration_s > 0


def test_a_microbatch_waits_for_the_replica_that_encoded_its_samples() -> None:
    # Replica 1 encodes both samples, one after the other in one microbatch; the llm's halves run one on each replica.
    batch = batch_of({"encoder": [2.0, 3.0], "llm": [1.0, 1.0]}, {"encoder": 1, "llm": 1}, replicas=2, microbatches=2)
    actions = timeline(Work.of(batch, np.array([[2, 2], [0, 2]])))
    assert rows(actions) == [
        (0, "F0", 0, 0), (0, "B0", 0, 0), (1, "F0", 5, 6), (1, "B0", 6, 8),
        (0, "F0", 0, 5), (0, "B0", 8, 18), (1, "F0", 5, 6), (1, "B0", 6, 8),
    ]  # fmt: skip
    assert actions.replica.tolist() == [0] * 4 + [1] * 4


def test_empty_microbatches_are_left_out_wherever_they_stand() -> None:
    stages = {"encoder": 1, "llm": 2}
    costs = {"encoder": [1.0, 2.0, 3.0], "llm": [3.0, 1.0, 2.0]}
    full = Work.of(batch_of(costs, stages, microbatches=3), np.tile([0, 1, 2], (2, 1)))
    holes = Work.of(batch_of(costs, stages, microbatches=6), np.tile([0, 2, 5], (2, 1)))
    assert simulate(holes) == simulate(full)
    assert set(timeline(holes).microbatch) == {0, 2, 5}


def test_a_microbatch_that_is_empty_in_one_unit_is_an_action_without_length() -> None:
    batch = batch_of({"encoder": [1.0, 1.0], "llm": [1.0, 1.0]}, {"encoder": 1, "llm": 1}, microbatches=2)
    actions = timeline(Work.of(batch, np.array([[0, 0], [1, 1]])))
    lengths = dict(zip(keys_of(actions), (actions.end_s - actions.start_s).tolist(), strict=True))
    assert lengths[0, 0, 0, 0, 0] == lengths[0, 1, 0, 1, 0] == 2
    assert lengths[0, 0, 0, 1, 0] == lengths[0, 1, 0, 0, 0] == 0


def test_a_replica_without_samples_and_work_without_length_take_no_time() -> None:
    batch = batch_of({"llm": [0.0]}, {"llm": 2}, replicas=2, microbatches=3)
    work = Work.of(batch, np.array([[3]]))
    predicted = simulate(work)
    assert (predicted.iteration_s, predicted.bubble, predicted.lower_bound_s) == (0, 0, 0)
    assert set(timeline(work).replica) == {1}
    assert peak_memory(work).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("1f1b", [7, 6, 6, 5, 4, 3, 2, 1]),
        ("gpipe", [9] * 8),
        ("eager", [9] * 7 + [1]),
        ("interleaved", [7, 6, 6, 5, 4, 3, 2, 1]),
    ],
)
def test_peak_memory_counts_the_microbatches_in_flight(schedule: str, expected: list[int]) -> None:
    batch, slots = equal({"vision": 2, "audio": 1, "llm": 5}, microbatches=9, schedule=schedule)
    assert peak_memory(Work.of(batch, slots)).tolist() == [expected]


def test_a_deferred_sample_keeps_its_part_until_its_own_backward() -> None:
    costs, memory = {"encoder": [1.0] * 3, "llm": [1.0] * 3}, {"encoder": [4.0, 8.0, 1.0], "llm": [1.0, 1.0, 1.0]}
    batch = batch_of(costs, {"encoder": 1, "llm": 1}, microbatches=3, memory=memory)
    actions = timeline(Work.of(batch, np.array([[0, 0, 1], [0, 2, 1]])))
    encoder = actions.stage == 0
    assert actions.kind[encoder].tolist() == [0, 0, 1, 0, 1, 1]
    assert actions.memory_after[encoder].tolist() == [12, 13, 9, 9, 8, 0]


@settings(derandomize=True, deadline=None, max_examples=60)
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
    seconds = makespan(work.forward_s[0], work.backward_s[0], filled, table)
    assert seconds == pytest.approx(timeline(work).end_s.max(), rel=1e-12)
    assert schedule_table(topology.stages, how, filled.size) is table


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.integers(0, 12), st.integers(1, 5), st.integers(0, 2**32))
def test_the_inputs_of_a_link_equal_the_slow_twins(count: int, num_slots: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    source, target = rng.integers(0, num_slots, (2, count))
    seconds = rng.random(count)
    offsets, slots, slot_seconds = np.zeros(num_slots + 1, np.int64), np.zeros(count, np.int64), np.zeros(count)
    link_inputs(source, target, seconds, 0.5, offsets, slots, slot_seconds)
    for t in range(num_slots):
        expected: dict[int, float] = {}
        for i in np.flatnonzero(target == t):
            expected[source[i]] = expected.get(source[i], 0.5) + seconds[i]
        found = slice(offsets[t], offsets[t + 1])
        assert dict(zip(slots[found].tolist(), slot_seconds[found].tolist(), strict=True)) == expected


def test_the_lower_bound_is_the_busiest_unit_or_the_longest_sample() -> None:
    stages = {"vision": 1, "audio": 1, "llm": 4}
    busy = batch_of({"vision": [9.0] * 8, "audio": [1.0] * 8, "llm": [1.0] * 8}, stages, replicas=2, microbatches=4)
    assert lower_bound(busy) == 3 * 72 / 2
    long = batch_of({"vision": [2.0], "audio": [3.0], "llm": [4.0]}, stages, replicas=2, microbatches=4, backward={"llm": 1.0})
    assert lower_bound(long) == 3 * 3 + 2 * 4
