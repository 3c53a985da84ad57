"""Units on the LLM's ranks are timed as a slow twin times them, and as stages of their own where nothing is shared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reorder_service.planning.batch import Batch, Slots
from headrace.reorder_service.planning.sharing import Sharing
from headrace.reorder_service.planning.simulation.eager_depth import planned_work
from headrace.reorder_service.planning.simulation.list_schedule import CELL, KIND, REPLICA, SLOT, STAGE, UNIT, WIDTH
from headrace.reorder_service.planning.simulation.shared_ranks import SharedStep, least_shared_s, simulate_shared
from headrace.reorder_service.planning.simulation.simulator import peak_memory, simulate, timeline
from headrace.schedule import Kind
from tests.examples import with_examples
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
    pieces = {unit: draw(st.integers(2, 3)) for unit, n in stages.items() if unit != "llm" and n == 1 and draw(st.booleans())}
    rows = 1 if not draw(st.booleans()) else len(stages)
    index = np.sort(np.broadcast_to(rng.integers(0, microbatches, (rows, count)), (len(stages), count)), axis=0)
    replica = np.stack([rng.integers(0, number, count) for number in own.values()])
    return batch, replica * microbatches + index, Sharing(order=draw(st.sampled_from(ORDERS)), slices=slices, pieces=pieces)


class CutTwin(Twin):
    """A twin in which some units in one stage run a pass in pieces, one after the other."""

    def __init__(self, batch: Batch, slots: Slots, pieces: Mapping[str, int]) -> None:
        super().__init__(batch, slots)
        self.pieces = [pieces.get(unit, 1) for unit in self.units]

    def later_parts(self, unit: int, replica: int, microbatch: int, back: int) -> float:
        return super().later_parts(unit, replica, microbatch, back) / self.pieces[unit]

    def seconds(self, key: Key) -> float:
        return super().seconds(key) / self.pieces[self.unit_of(key[1])]

    def in_pieces(self, key: Key) -> list[Key]:
        """The pieces of an action, in the order in which they run."""
        numbers = range(self.pieces[self.unit_of(key[1])])
        return [(*key[:4], number) for number in (numbers if key[2] == Kind.FORWARD else reversed(numbers))]

    def neighbours(self, key: Key) -> list[tuple[Key, float]]:
        whole = (*key[:4], 0)
        pieces = self.in_pieces(whole)
        if key != pieces[0]:
            return [(pieces[pieces.index(key) - 1], 0.0)]
        return [(self.in_pieces(source)[-1], hop) for source, hop in super().neighbours(whole)]


class SharedTwin:
    """The turns and times of one step, action by action, with nothing taken from the simulator but the schedule."""

    def __init__(self, batch: Batch, slots: Slots, sharing: Sharing) -> None:
        self.twin, self.sharing, self.batch = CutTwin(batch, slots, sharing.pieces), sharing, batch
        self.queues: dict[tuple[int, int], list[Key]] = {}
        for r, schedule in enumerate(self.twin.schedule):
            for stage, actions in enumerate(schedule):
                if r < batch.unit_replicas[self.twin.unit_of(stage)]:
                    whole = [(r, stage, int(a.kind), a.microbatch, a.chunk) for a in actions]
                    keys = [piece for key in whole for piece in self.twin.in_pieces(key)]
                    if sharing.order == "colocated" and self.is_guest(stage):
                        keys.sort(key=lambda key: key[2] != Kind.FORWARD)
                    self.queues[r, stage] = keys

    def unit(self, stage: int) -> str:
        return self.twin.units[self.twin.unit_of(stage)]

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
                needed = [source for source, _ in self.twin.neighbours(keys[0])] if keys else [None]
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
        forward_s = sum(self.batch.costs[unit][samples]) / (self.twin.sizes[unit] * self.twin.pieces[unit])
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
            found[key] = begin, begin + self.twin.seconds(key)
        return found

    def can_run(self, key: Key, lists: dict[int, list[Key]], done: dict[Key, tuple[float, float]]) -> bool:
        heads = all(lists[rank][0] == key for rank in self.ranks(key[0], key[1]))
        return heads and all(source in done for source, _ in self.twin.neighbours(key))

    def arrivals(self, key: Key, done: dict[Key, tuple[float, float]]) -> Iterator[float]:
        for source, hop in self.twin.neighbours(key):
            together = set(self.ranks(*source[:2])) & set(self.ranks(*key[:2]))
            yield done[source][1] + (min(hop, 0.0) if together else hop)


def keys_of_step(step: SharedStep, batch: Batch) -> list[Key]:
    """Replica, stage, kind, microbatch and piece of every action."""
    columns = step.actions[:, [REPLICA, STAGE, KIND, SLOT]]
    columns[:, 3] %= batch.topology.microbatches
    return [(*row, piece) for row, piece in zip(columns.tolist(), step.chunk.tolist(), strict=True)]


@with_examples(60)
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
    keys = keys_of_step(step, batch)
    assert set(keys) == set(times)
    assert len(keys) == len(times)
    for key, start_s, end_s in zip(keys, step.start_s, step.end_s, strict=True):
        assert (start_s, end_s) == pytest.approx(times[key]), key
    assert step.step_s == pytest.approx(max(end for _, end in times.values()))
    assert step.step_s >= least_shared_s(batch, sharing) * (1 - 1e-9)


@with_examples(60)
@given(shared_plans())
def test_a_cell_does_one_thing_at_a_time_and_holds_what_runs_on_it(plan: tuple[Batch, Slots, Sharing]) -> None:
    batch, slots, sharing = plan
    try:
        step = simulate_shared(batch, slots, sharing)
    except ValueError:
        return
    pieces = np.array([sharing.pieces.get(unit, 1) for unit in batch.units])
    memory = planned_work(batch, slots).memory / pieces
    held = np.zeros(int((step.actions[:, CELL] + step.actions[:, WIDTH]).max()))
    most = np.zeros(held.size)
    free_s = np.zeros(held.size)
    for a in np.lexsort((step.turn, step.start_s)):
        action = step.actions[a]
        cells = slice(action[CELL], action[CELL] + action[WIDTH])
        assert (step.start_s[a] >= free_s[cells] - 1e-9).all()
        free_s[cells] = step.end_s[a]
        unit = action[UNIT]
        if action[KIND] == Kind.FORWARD:
            held[cells] += memory[0, action[SLOT], unit]
            most = np.maximum(most, held)
        elif action[KIND] == batch.execution.freed_by(batch.units[unit]):
            held[cells] -= memory[1, action[SLOT], unit]
    assert step.peaks.max() == pytest.approx(most.max())
    assert held == pytest.approx(0.0, abs=1e-9)


@with_examples(60)
@given(shared_plans())
def test_the_critical_path_leads_from_the_start_of_the_step_to_its_end(plan: tuple[Batch, Slots, Sharing]) -> None:
    batch, slots, sharing = plan
    try:
        step = simulate_shared(batch, slots, sharing)
    except ValueError:
        return
    actions = step.timeline(batch.topology.microbatches)
    assert [*zip(*(getattr(actions, name) for name in ("replica", "stage", "kind", "microbatch", "chunk")), strict=True)] == (
        keys_of_step(step, batch)
    )
    path = np.flatnonzero(actions.critical)
    path = path[np.lexsort((step.turn[path], step.end_s[path], step.start_s[path]))]
    assert step.start_s[path[0]] == 0.0
    assert step.end_s[path].max() == step.step_s
    begins, hops = step.start_s[path[1:]], step.start_s[path[1:]] - step.end_s[path[:-1]]
    assert (begins >= step.start_s[path[:-1]]).all()
    if batch.execution.latency_s == 0:
        assert hops.max(initial=0.0) <= 1e-9, "nothing is on its way"


@with_examples(60)
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
    for key, end_s in zip(keys_of(actions := timeline(work)), actions.end_s.tolist(), strict=True):
        ends.setdefault(key, []).append(end_s)
    found: dict[tuple[int, ...], list[float]] = {}
    for key, end_s in zip(keys_of_step(step, batch), step.end_s.tolist(), strict=True):
        found.setdefault(key, []).append(end_s)
    assert found.keys() == ends.keys()
    for key in found:
        assert found[key] == pytest.approx(ends[key])


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


@pytest.mark.parametrize("pieces", [{"llm": 2}, {"x": 2}, {"e": 0}])
def test_only_guests_are_cut_into_pieces(pieces: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="pieces are at least 1, of units on the ranks of 'llm'"):
        Sharing(order="nested", slices={"e": 1, "llm": 1}, pieces=pieces)


def test_guests_have_as_many_ranks_as_the_llm() -> None:
    batch = batch_of({"e": [1.0], "llm": [1.0]}, {"e": 1, "llm": 2}, replicas=1, microbatches=1)
    with pytest.raises(ValueError, match="'e' on the LLM's ranks has 1 of them, but there are 2"):
        simulate_shared(batch, np.zeros((2, 1), np.int64), Sharing(order="nested", slices={"e": 1, "llm": 1}))
