"""Units on the LLM's ranks are timed as a slow twin times them, and as stages of their own where nothing is shared."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.reorder_service.planning.batch import Batch, Slots
from headrace.reorder_service.planning.sharing import Sharing
from headrace.reorder_service.planning.simulation.eager_depth import planned_work
from headrace.reorder_service.planning.simulation.list_schedule import CELL, KIND, REPLICA, SLOT, STAGE, UNIT, WIDTH
from headrace.reorder_service.planning.simulation.shared_ranks import SharedStep, least_shared_s, simulate_shared
from headrace.reorder_service.planning.simulation.simulator import peak_memory, simulate, timeline
from headrace.schedule import Kind
from tests.unit.reorder_service.planning.simulator_world import Key, Twin, batch_of, keys_of, plans

ORDERS = ("colocated", "nested")


@st.composite
def shared_plans(draw: st.DrawFn) -> tuple[Batch, Slots, Sharing]:
    """One or two encoders on the ranks of an LLM, with samples anywhere that a plan may put them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    slices = {f"e{i}": draw(st.sampled_from([1, 2])) for i in range(draw(st.integers(1, 2)))} | {
        "llm": draw(st.sampled_from([1, 2]))
    }
    dp, pp = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    ranks = 2 * dp * pp
    stages, own = {}, {}
    for unit, width in slices.items():
        stages[unit] = draw(st.sampled_from([n for n in (1, 2) if ranks % (width * n) == 0])) if unit != "llm" else pp
        own[unit] = ranks // (width * stages[unit])
    count, microbatches = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    timed = draw(st.booleans())
    batch = batch_of(
        {unit: rng.lognormal(0, 1.5, count) for unit in stages},
        stages,
        replicas=own["llm"],
        microbatches=microbatches,
        memory={unit: rng.lognormal(0, 1.0, count) for unit in stages},
        bytes_={unit: rng.lognormal(0, 1.0, count) for unit in stages},
        schedule=draw(st.sampled_from(["1f1b", "gpipe", "zero-bubble"])),
        backward_factors={unit: draw(st.sampled_from([0.0, 1.0, 2.0])) for unit in list(stages)[:-1]},
        latency_s=0.2 if timed else 0.0,
        bytes_per_s=5.0 if timed else np.inf,
        unit_replicas={unit: number for unit, number in own.items() if unit != "llm"},
    )
    rows = 1 if not draw(st.booleans()) else len(stages)
    index = np.sort(np.broadcast_to(rng.integers(0, microbatches, (rows, count)), (len(stages), count)), axis=0)
    replica = np.stack([rng.integers(0, number, count) for number in own.values()])
    pieces = {unit: draw(st.sampled_from([1, 1, 2, 3])) for unit in stages if unit != "llm" and stages[unit] == 1}
    return batch, replica * microbatches + index, Sharing(order=draw(st.sampled_from(ORDERS)), slices=slices, pieces=pieces)


class TwinInPieces(Twin):
    """What of a sample's parts is later is so in the last of an action's pieces."""

    def __init__(self, batch: Batch, slots: Slots, sharing: Sharing) -> None:
        super().__init__(batch, slots)
        self.pieces = [sharing.pieces.get(unit, 1) for unit in self.units]

    def later_parts(self, unit: int, replica: int, microbatch: int, back: int) -> float:
        return super().later_parts(unit, replica, microbatch, back) / self.pieces[unit]


class SharedTwin:
    """The turns and times of one step, action by action, with nothing taken from the simulator but the schedule."""

    def __init__(self, batch: Batch, slots: Slots, sharing: Sharing) -> None:
        self.twin, self.sharing, self.batch = TwinInPieces(batch, slots, sharing), sharing, batch
        self.queues: dict[tuple[int, int], list[Key]] = {}
        for r, schedule in enumerate(self.twin.schedule):
            for stage, actions in enumerate(schedule):
                if r < batch.unit_replicas[self.twin.unit_of(stage)]:
                    number = self.pieces(stage)
                    keys = [
                        (r, stage, int(a.kind), a.microbatch, max(piece, a.chunk))
                        for a in actions
                        for piece in (range(number) if a.kind == Kind.FORWARD else reversed(range(number)))
                    ]
                    if sharing.order == "colocated" and self.is_guest(stage):
                        keys.sort(key=lambda key: key[2] != Kind.FORWARD)
                    self.queues[r, stage] = keys

    def unit(self, stage: int) -> str:
        return self.twin.units[self.twin.unit_of(stage)]

    def pieces(self, stage: int) -> int:
        return self.twin.pieces[self.twin.unit_of(stage)]

    def neighbours(self, key: Key) -> list[tuple[Key, float]]:
        """What an action waits for: a piece behind the first one for nothing but that in front of it."""
        replica, stage, kind, microbatch, piece = key
        if (number := self.pieces(stage)) > 1:
            if piece != (0 if kind == Kind.FORWARD else number - 1):
                return [((replica, stage, kind, microbatch, piece + (-1 if kind == Kind.FORWARD else 1)), 0.0)]
            key = replica, stage, kind, microbatch, 0
        found = []
        for (r, s, of_kind, m, chunk), hop in self.twin.neighbours(key):
            last = self.pieces(s) - 1 if of_kind == Kind.FORWARD else 0
            found.append(((r, s, of_kind, m, last if self.pieces(s) > 1 else chunk), hop))
        return found

    def is_guest(self, stage: int) -> bool:
        return self.unit(stage) != "llm"

    def ranks(self, replica: int, stage: int) -> range:
        unit = self.twin.unit_of(stage)
        width = self.sharing.slices[self.unit(stage)]
        first = (replica * self.twin.sizes[unit] + stage - self.twin.first[unit]) * width
        return range(first, first + width)

    def turns(self) -> list[Key]:
        """All actions in an order that all ranks keep to."""
        if self.sharing.order == "colocated":
            phases = [
                [key for (_, stage), keys in sorted(self.queues.items(), key=lambda item: item[0][1]) for key in keys
                 if phase == (1 if not self.is_guest(stage) else 0 if key[2] == Kind.FORWARD else 2)]
                for phase in range(3)
            ]  # fmt: skip
            return [key for phase in phases for key in phase]
        left = {place: list(keys) for place, keys in self.queues.items()}
        end: dict[Key, float] = {}
        free: dict[int, float] = {}
        found = []
        while any(left.values()):
            offers = []
            for (r, stage), keys in left.items():
                needed = [source for source, _ in self.neighbours(keys[0])] if keys else [None]
                if all(source in end for source in needed):
                    begin = max([0.0, *(end[n] for n in needed), *(free.get(rank, 0.0) for rank in self.ranks(r, stage))])
                    rank = 0 if not self.is_guest(stage) else 1 if keys[0][2] == Kind.BACKWARD else 2
                    offers.append((begin, rank, self.unit(stage), r, stage))
            begin, _, _, r, stage = min(offers)
            key = left[r, stage].pop(0)
            end[key] = begin + self.assumed_s(key)
            free |= dict.fromkeys(self.ranks(r, stage), end[key])
            found.append(key)
        return found

    def assumed_s(self, key: Key) -> float:
        unit = self.twin.unit_of(key[1])
        samples = self.twin.samples(unit, key[2], key[0], key[3])
        forward_s = sum(self.batch.costs[unit][samples]) / self.twin.sizes[unit] / self.twin.pieces[unit]
        learns, has_backward = self.twin.weights(unit) > 0, self.twin.factor(unit) > 0
        whole = min(2.0, self.twin.factor(unit))
        return forward_s * (1.0, has_backward * (whole - learns), float(learns))[key[2]]

    def times(self) -> dict[Key, tuple[float, float]]:
        lists: dict[int, list[Key]] = {}
        for key in self.turns():
            for rank in self.ranks(key[0], key[1]):
                lists.setdefault(rank, []).append(key)
        found: dict[Key, tuple[float, float]] = {}
        while any(lists.values()):
            key = next(keys[0] for keys in lists.values() if keys and self.can_run(keys[0], lists, found))
            begin = max([0.0, *self.arrivals(key, found)])
            for rank in self.ranks(key[0], key[1]):
                lists[rank].pop(0)
                begin = max([begin, *(end for other, (_, end) in found.items() if rank in self.ranks(other[0], other[1]))])
            found[key] = begin, begin + self.twin.seconds(key) / self.pieces(key[1])
        return found

    def can_run(self, key: Key, lists: dict[int, list[Key]], done: dict[Key, tuple[float, float]]) -> bool:
        heads = all(lists[rank][0] == key for rank in self.ranks(key[0], key[1]))
        return heads and all(source in done for source, _ in self.neighbours(key))

    def arrivals(self, key: Key, done: dict[Key, tuple[float, float]]) -> Iterator[float]:
        for source, hop in self.neighbours(key):
            together = set(self.ranks(*source[:2])) & set(self.ranks(*key[:2]))
            yield done[source][1] + (min(hop, 0.0) if together else hop)


def keys_of_step(step: SharedStep, batch: Batch) -> list[tuple[int, int, int, int]]:
    """Replica, stage, kind and microbatch of every action, of its pieces too."""
    columns = step.actions[:, [REPLICA, STAGE, KIND, SLOT]]
    columns[:, 3] %= batch.topology.microbatches
    return [tuple(row) for row in columns.tolist()]


@settings(max_examples=60, deadline=None)
@given(shared_plans())
def test_actions_take_the_turns_and_the_times_of_the_twin(plan: tuple[Batch, Slots, Sharing]) -> None:
    batch, slots, sharing = plan
    try:
        step = simulate_shared(batch, slots, sharing)
    except ValueError:
        with pytest.raises((ValueError, StopIteration)):
            SharedTwin(batch, slots, sharing).times()
        return
    times = SharedTwin(batch, slots, sharing).times()
    expected: dict[tuple[int, ...], list[tuple[float, float]]] = {}
    for (*action, _), span in times.items():
        expected.setdefault(tuple(action), []).append(span)
    found: dict[tuple[int, ...], list[tuple[float, float]]] = {}
    for action, start_s, end_s in zip(keys_of_step(step, batch), step.start_s.tolist(), step.end_s.tolist(), strict=True):
        found.setdefault(action, []).append((start_s, end_s))
    assert found.keys() == expected.keys()
    for action, spans in found.items():
        assert np.array(sorted(spans)) == pytest.approx(np.array(sorted(expected[action]))), action
    assert step.step_s == pytest.approx(max(end for _, end in times.values()))
    assert step.step_s >= least_shared_s(batch, sharing) * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(shared_plans())
def test_a_cell_does_one_thing_at_a_time_and_holds_what_runs_on_it(plan: tuple[Batch, Slots, Sharing]) -> None:
    batch, slots, sharing = plan
    try:
        step = simulate_shared(batch, slots, sharing)
    except ValueError:
        return
    work = planned_work(batch, slots)
    held = np.zeros(int((step.actions[:, CELL] + step.actions[:, WIDTH]).max()))
    most = np.zeros(held.size)
    free_s = np.zeros(held.size)
    for a in np.lexsort((step.turn, step.start_s)):
        action = step.actions[a]
        cells = slice(action[CELL], action[CELL] + action[WIDTH])
        assert (step.start_s[a] >= free_s[cells] - 1e-9).all()
        free_s[cells] = step.end_s[a]
        unit = action[UNIT]
        takes, gives = work.memory[:, action[SLOT], unit] / sharing.pieces.get(batch.units[unit], 1)
        if action[KIND] == Kind.FORWARD:
            held[cells] += takes
            most = np.maximum(most, held)
        elif action[KIND] == batch.execution.freed_by(batch.units[unit]):
            held[cells] -= gives
    assert step.peaks.max() == pytest.approx(most.max())
    assert held == pytest.approx(0.0, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(plans(), st.sampled_from(ORDERS))
def test_where_nothing_is_shared_it_is_the_simulator(plan: tuple[Batch, Slots], order: str) -> None:
    batch, slots = plan
    work, alone = planned_work(batch, slots), Sharing(order=order, slices={"llm": 1})
    try:
        expected = simulate(work)
    except ValueError:
        with pytest.raises(ValueError, match="wait for itself"):
            simulate_shared(batch, slots, alone)
        return
    step = simulate_shared(batch, slots, alone)
    assert step.step_s == pytest.approx(expected.iteration_s)
    assert step.peaks == pytest.approx(peak_memory(work).max(axis=0))
    ends: dict[tuple[int, ...], list[float]] = {}
    for (*key, _), end_s in zip(keys_of(actions := timeline(work)), actions.end_s.tolist(), strict=True):
        ends.setdefault(tuple(key), []).append(end_s)
    found: dict[tuple[int, ...], list[float]] = {}
    for action, end_s in zip(keys_of_step(step, batch), step.end_s.tolist(), strict=True):
        found.setdefault(action, []).append(end_s)
    assert found.keys() == ends.keys()
    for action in found:
        assert sorted(found[action]) == pytest.approx(sorted(ends[action])), "of all chunks of the stage"


def test_encoders_run_in_front_of_the_llm_or_in_its_bubbles() -> None:
    """Two stages of an LLM, 1 s forward and 2 s backward each a microbatch, and an encoder on both ranks, frozen, 1 s a sample.

    1F1B alone takes (4 + 1) x 3 s. Colocated, each rank first encodes two of the four samples. Nested, only the first sample's
    second is in front of the LLM: the second rank waits for the LLM's first stage anyway, and encodes meanwhile.
    """
    batch = batch_of(
        {"e": [1.0] * 4, "llm": [2.0] * 4}, {"e": 1, "llm": 2}, replicas=1, microbatches=4,
        unit_replicas={"e": 2}, backward_factors={"e": 0.0},
    )  # fmt: skip
    slots = np.array([[0, 5, 2, 7], [0, 1, 2, 3]])
    steps = {order: simulate_shared(batch, slots, Sharing(order=order, slices={"e": 1, "llm": 1})).step_s for order in ORDERS}
    assert steps["colocated"] == 2 + 15
    assert 15 < steps["nested"] <= 17


def test_nesting_bounds_what_encoders_hold_and_colocating_holds_the_whole_step() -> None:
    batch = batch_of(
        {"e": [1.0] * 8, "llm": [1.0] * 8}, {"e": 1, "llm": 1}, replicas=1, microbatches=8,
        memory={"e": [1.0] * 8, "llm": [0.0] * 8},
    )  # fmt: skip
    slots = np.arange(8) * np.ones((2, 1), np.int64)
    peaks = {order: simulate_shared(batch, slots, Sharing(order=order, slices={"e": 1, "llm": 1})).peaks for order in ORDERS}
    assert peaks["colocated"].tolist() == [8.0, 8.0]
    assert peaks["nested"].tolist() == [2.0, 2.0]


def test_guests_have_as_many_ranks_as_the_llm() -> None:
    batch = batch_of({"e": [1.0], "llm": [1.0]}, {"e": 1, "llm": 2}, replicas=1, microbatches=1)
    with pytest.raises(ValueError, match="'e' on the LLM's ranks has 1 of them, but there are 2"):
        simulate_shared(batch, np.zeros((2, 1), np.int64), Sharing(order="nested", slices={"e": 1, "llm": 1}))


def test_pieces_are_of_units_on_the_llms_ranks() -> None:
    with pytest.raises(ValueError, match="pieces are at least 1, of units on the llm's ranks"):
        Sharing(order="nested", slices={"e": 1, "llm": 1}, pieces={"llm": 2})


def test_passes_in_pieces_fit_where_whole_ones_keep_the_llm_waiting() -> None:
    """Two stages of an LLM, and an encoder on both ranks whose samples take longer than an LLM's stage waits."""
    batch = batch_of(
        {"e": [6.0] * 8, "llm": [2.0] * 8}, {"e": 1, "llm": 2}, replicas=1, microbatches=8, unit_replicas={"e": 2},
        memory={"e": [1.0] * 8, "llm": [0.0] * 8},
    )  # fmt: skip
    slots = np.array([np.arange(8) + 8 * (np.arange(8) % 2), np.arange(8)])
    slices = {"e": 1, "llm": 1}
    whole, cut = (
        simulate_shared(batch, slots, Sharing(order="nested", slices=slices, pieces=pieces)) for pieces in ({}, {"e": 6})
    )
    assert least_shared_s(batch, Sharing(order="nested", slices=slices)) <= cut.step_s < whole.step_s
    assert len(cut.actions) == len(whole.actions) + 5 * 2 * 8 * 2, "forth and back, on two replicas"
