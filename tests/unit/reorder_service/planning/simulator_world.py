"""Batches and plans for the simulator, and a slow twin of it that follows every sample through the pipeline."""

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
from hypothesis import strategies as st

from headrace.plan import Topology
from headrace.reorder_service.planning.batch import Batch, Slots, make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.simulation.simulator import Timeline
from headrace.schedule import SCHEDULES, Kind, build

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
        for r in range(batch.most_replicas):
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

    def exchange_s(self, stage: int) -> tuple[float, float]:
        return self.how.exchange_s.get(self.units[self.unit_of(stage)], (0.0, 0.0))

    def samples(self, unit: int, kind: int, replica: int, microbatch: int) -> list[int]:
        where = (self.place if kind == Kind.FORWARD else self.back)[unit]
        return [i for i, place in enumerate(where) if place == (replica, microbatch)]

    def factor(self, unit: int) -> float:
        return self.how.backward_factor(self.units[unit])

    def weights(self, unit: int) -> float:
        """How much of the factor is put off."""
        if self.how.schedule != "zero-bubble":
            return 0.0
        return self.how.weight_gradient_factors.get(self.units[unit], min(1.0, self.factor(unit)))

    def seconds(self, key: Key) -> float:
        replica, stage, kind, microbatch, _ = key
        unit = self.unit_of(stage)
        total = sum(self.batch.costs[unit][i] for i in self.samples(unit, kind, replica, microbatch))
        over_forward = (1.0, self.factor(unit) - self.weights(unit), self.weights(unit))[kind]
        return total * over_forward / (self.sizes[unit] * self.how.chunks)

    def transfer(self, unit: int, kind: int, samples: list[int]) -> float:
        """Of what `unit` passes on of the samples, or of their gradients back to it."""
        if not samples or (kind and self.factor(unit) == 0):
            return 0.0
        return self.how.latency_s + sum(self.batch.transfer_bytes[unit][i] for i in samples) / self.how.bytes_per_s

    def later_parts(self, unit: int, replica: int, microbatch: int, back: int) -> float:
        """Seconds that a forward spends on the samples that come back after `back`: they go last."""
        later = [i for i in self.samples(unit, Kind.FORWARD, replica, microbatch) if self.back[unit][i][1] > back]
        return sum(self.batch.costs[unit][i] for i in later) / (self.sizes[unit] * self.how.chunks)

    def overlap(self, unit: int, kind: int, samples: list[int]) -> float:
        """Seconds that two stages of a unit work at once on samples that pass in parts, by where they are on the other way."""
        on_the_way_back, factor = (
            (self.back, 1.0) if kind == Kind.FORWARD else (self.place, self.factor(unit) - self.weights(unit))
        )
        parts: dict[int, float] = {}
        for i in samples:
            part = on_the_way_back[unit][i][1]
            parts[part] = parts.get(part, 0.0) + factor * self.batch.costs[unit][i] / (self.sizes[unit] * self.how.chunks)
        return sum(parts.values()) - max(parts.values(), default=0.0)

    def neighbours(self, key: Key) -> list[tuple[Key, float]]:
        """What the action waits for, and the time on the way."""
        replica, stage, kind, k, chunk = key
        if kind == Kind.WEIGHT:
            return [((replica, stage, int(Kind.BACKWARD), k, chunk), 0.0)]
        unit = self.unit_of(stage)
        index, size, last = stage - self.first[unit], self.sizes[unit], self.how.chunks - 1
        mine = self.samples(unit, kind, replica, k)
        hop = self.transfer(unit, kind, mine) - self.overlap(unit, kind, mine)
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
                    late_s = self.transfer(in_front, kind, shared)
                    if kind == Kind.FORWARD:
                        late_s -= self.later_parts(other, source, k_source, max(self.back[other][i][1] for i in shared))
                    found.append(((source, exit_stage, kind, k_source, exit_chunk), late_s))
        if kind == Kind.BACKWARD and unit == len(self.units) - 1:
            found.append(((replica, stage, 0, k, chunk), 0.0))
        return found

    def times(self) -> dict[Key, tuple[float, float]]:
        """Start and end of every action that a unit has a replica for. Raises RecursionError where they wait for each other."""
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
            ready = [self.exchange_s(key[1])[0] if previous is None else times(previous)[1]]
            ready += [times(needed)[1] + hop for needed, hop in self.neighbours(key)]
            open_.remove(key)
            return max(ready), max(ready) + self.seconds(key)

        return {key: times(key) for key in before if key[0] < self.batch.unit_replicas[self.unit_of(key[1])]}

    def peaks(self) -> np.ndarray:
        """(D, S) by adding up what every sample keeps."""
        most = np.zeros((self.batch.most_replicas, self.shape.num_stages))
        for r, schedule in enumerate(self.schedule):
            for s, actions in enumerate(schedule):
                unit, held = self.unit_of(s), 0.0
                last = Kind.WEIGHT if self.weights(unit) else Kind.BACKWARD
                for a in actions:
                    size = sum(self.batch.memory[unit][i] for i in self.samples(unit, a.kind, r, a.microbatch))
                    sign = 1 if a.kind == Kind.FORWARD else -(a.kind == last)
                    held += sign * size * (self.factor(unit) > 0)
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
    backward = {unit: draw(st.sampled_from([0.0, 1.0, 2.0, 3.0])) for unit in stages} if draw(st.booleans()) else {}
    defers, crosses, timed = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    own = {unit: draw(st.integers(1, 4)) for unit in stages if unit != "llm"} if draw(st.booleans()) else {}

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
        backward_factors=backward,
        weight_gradient_factors={unit: draw(st.sampled_from([0.0, 1.0])) for unit, factor in backward.items() if factor},
        split_backward=split,
        latency_s=0.3 if timed and draw(st.booleans()) else 0.0,
        bytes_per_s=4.0 if timed else np.inf,
        unit_replicas=own,
        exchange_s={unit: (float(rng.random()), float(rng.random())) for unit in stages} if draw(st.booleans()) else {},
    )
    index = rng.integers(0, microbatches, (len(stages), count)) if defers else rng.integers(0, microbatches, (1, count))
    index = np.sort(np.broadcast_to(index, (len(stages), count)), axis=0)
    replica = rng.integers(0, replicas, (len(stages) if crosses else 1, count))
    if own:
        replica = np.stack([rng.integers(0, own.get(unit, replicas), count) for unit in stages])
    return batch, replica * microbatches + index


def keys_of(actions: Timeline) -> list[Key]:
    columns = (actions.replica, actions.stage, actions.kind, actions.microbatch, actions.chunk)
    return list(zip(*(column.tolist() for column in columns), strict=True))
