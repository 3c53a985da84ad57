"""The planner's input (`Batch`, checked by `make_batch`) and its output in array form (`Slots`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np
from numpy.typing import NDArray

from headrace.plan import LLM, Microbatch, StepPlan, Topology
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.slot_order import samples_by_slot

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# (U, n): slot of every sample in every unit, where slot r * K + k is microbatch k of replica r of that unit. A sample's slots
# differ between units if it is deferred (to a later microbatch), if a strategy balances each unit separately (on another
# replica), or if the units have different numbers of replicas. The index of its microbatch never decreases from one unit to the
# next in pipeline order.
Slots = Ints

_LARGEST_SUM = 1e300  # a step's time is a small multiple of the sum of costs, and must be finite too


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """A global batch to plan: n samples, what each costs in each of U units, and the pipeline that will run them."""

    sample_ids: Ints
    """(n,) ids of the samples, all different, in arrival order."""
    costs: Floats
    """(U, n), C-contiguous: forward seconds of a sample in all stages of the unit together; units in pipeline order."""
    memory: Floats
    """(U, n): activations of a sample that all stages of the unit keep from its forward to its backward; `costs` if unknown."""
    transfer_bytes: Floats
    """(U, n): bytes that a stage of the unit sends on for a sample; zeros if unknown."""
    tokens: Ints | None
    """(n,) tokens of a sample in the LLM; None if unknown."""
    topology: Topology
    seed: int
    execution: Execution
    degrees: Ints | None = None
    """(n,) number of ranks that share the sequence of each sample in the LLM, the first of which is that of its slot
    (`strategies.shared_sequences`); None: each is on one."""

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the U units in pipeline order."""
        return tuple(self.topology.stages)

    @property
    def unit_replicas(self) -> tuple[int, ...]:
        """Number of replicas of each of the U units."""
        return tuple(self.execution.unit_replicas.get(unit, self.topology.replicas) for unit in self.units)

    @property
    def most_replicas(self) -> int:
        """D, the number of replicas of the unit that has most of them; arrays by replica have a row for each."""
        return max(self.unit_replicas)

    @property
    def num_slots(self) -> int:
        """Number of microbatches of D replicas together."""
        return self.most_replicas * self.topology.microbatches

    @property
    def step_factors(self) -> Floats:
        """(U,) ratio of forward and backward together to the forward, by unit."""
        return np.array([self.execution.step_factor(unit) for unit in self.units])

    def of_rows(self, rows: Ints, topology: Topology) -> Batch:
        """Return the samples in these rows as a batch for another topology with the same units."""
        costs = np.ascontiguousarray(self.costs[:, rows])
        return replace(
            self,
            sample_ids=self.sample_ids[rows],
            costs=costs,
            memory=costs if self.memory is self.costs else np.ascontiguousarray(self.memory[:, rows]),
            transfer_bytes=np.ascontiguousarray(self.transfer_bytes[:, rows]),
            tokens=None if self.tokens is None else self.tokens[rows],
            degrees=None if self.degrees is None else self.degrees[rows],
            topology=topology,
        )

    def loads(self, slots: Slots) -> Floats:
        """Return the forward seconds of every microbatch in every unit, as a (D, K, U) array.

        They are 0 on replicas that a unit does not have.
        """
        loads = np.empty((self.num_slots, len(self.units)))
        for u, (slot, cost) in enumerate(zip(slots, self.costs, strict=True)):
            loads[:, u] = np.bincount(slot, weights=cost, minlength=self.num_slots)
        return loads.reshape(self.most_replicas, self.topology.microbatches, len(self.units))

    def crosses_replicas(self, slots: Slots) -> bool:
        """Return whether any sample is processed on replicas of different units that are not of one lane.

        There are gcd(both numbers) lanes between a unit and the LLM; equal numbers of replicas are that many lanes.
        """
        replicas = slots // self.topology.microbatches
        llm = replicas[self.units.index(LLM)]
        for replica, number in zip(replicas, self.unit_replicas, strict=True):
            lanes = math.gcd(number, self.topology.replicas)
            if (replica * lanes // number != llm * lanes // self.topology.replicas).any():
                return True
        return False

    def occupied(self, slots: Slots) -> NDArray[np.bool_]:
        """Return which microbatches have a sample in any unit, as a (D, K) array."""
        filled = np.zeros(self.num_slots, np.bool_)
        filled[slots.ravel()] = True
        return filled.reshape(self.most_replicas, self.topology.microbatches)

    def replicas(self, slots: Slots) -> Replicas:
        """Return the slots in the form of `StepPlan.replicas`, with the samples of a microbatch in arrival order.

        A unit with another number of replicas than the LLM has its samples there on the replica that they have in the LLM.
        """
        if not self.execution.unit_replicas:
            return Replicas(self.sample_ids, slots, self.topology)
        count = self.topology.microbatches
        llm = slots[self.units.index(LLM)]
        own = np.array([unit in self.execution.unit_replicas for unit in self.units])
        return Replicas(self.sample_ids, np.where(own[:, None], llm - llm % count + slots % count, slots), self.topology)

    def shared_by(self) -> dict[int, int]:
        """Return the degrees in the form of `StepPlan.degrees`."""
        if self.degrees is None:
            return {}
        shared = self.degrees > 1
        return dict(zip(self.sample_ids[shared].tolist(), self.degrees[shared].tolist(), strict=True))

    def own_replicas(self, slots: Slots) -> dict[str, tuple[tuple[tuple[int, ...], ...], ...]]:
        """Return the slots in the form of `StepPlan.unit_replicas`, with the samples of a microbatch in arrival order."""
        count = self.topology.microbatches
        found = {}
        for unit, replicas in self.execution.unit_replicas.items():
            slot = slots[self.units.index(unit)]
            ids, ends = self.sample_ids[np.argsort(slot, kind="stable")], np.cumsum(np.bincount(slot, minlength=replicas * count))
            cut = tuple(_cut(ids, ends, 0, replicas * count))
            found[unit] = tuple(cut[r * count : (r + 1) * count] for r in range(replicas))
        return found


class Replicas(Sequence[tuple[Microbatch, ...]]):
    """A `StepPlan.replicas` that is kept as arrays: a replica's `Microbatch` objects are made when it is indexed."""

    def __init__(self, sample_ids: Ints, slots: Slots, topology: Topology) -> None:
        self._topology = topology
        num_slots = topology.replicas * topology.microbatches
        self._ids: list[Ints] = []
        self._ends: list[Ints] = []
        for u, slot in enumerate(slots):
            if u > 0 and (slot is slots[0] or np.array_equal(slot, slots[0])):
                self._ids.append(self._ids[0])
                self._ends.append(self._ends[0])
            else:
                self._ids.append(sample_ids[samples_by_slot(slot, num_slots)])
                self._ends.append(np.cumsum(np.bincount(slot, minlength=num_slots)))

    def __len__(self) -> int:
        return self._topology.replicas

    @overload
    def __getitem__(self, index: int) -> tuple[Microbatch, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[tuple[Microbatch, ...], ...]: ...
    def __getitem__(self, index: int | slice) -> tuple[Microbatch, ...] | tuple[tuple[Microbatch, ...], ...]:
        if isinstance(index, slice):
            return tuple(self[r] for r in range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"replica {index} of {len(self)}")
        count = self._topology.microbatches
        first = index % len(self) * count
        parts = [_cut(ids, ends, first, first + count) for ids, ends in zip(self._ids, self._ends, strict=True)]
        return tuple(
            Microbatch(units=dict(zip(self._topology.stages, of_microbatch, strict=True)))
            for of_microbatch in zip(*parts, strict=True)
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]


def _cut(ids: Ints, ends: Ints, first: int, last: int) -> Iterable[tuple[int, ...]]:
    """Return the sample ids of each of the slots first .. last - 1."""
    start = int(ends[first - 1]) if first else 0
    local = ids[start : int(ends[last - 1])].tolist()
    bounds = (ends[first:last] - start).tolist()
    return [tuple(local[a:b]) for a, b in zip([0, *bounds[:-1]], bounds, strict=True)]


def slots_of(plan: StepPlan, sample_ids: NDArray[np.integer]) -> Slots:
    """Return the (U, n) slots of a finished plan, with samples in the order of `sample_ids`.

    Raises ValueError if the plan has a sample that is not among `sample_ids`, or lacks one.
    """
    row_of = {sample_id: row for row, sample_id in enumerate(np.asarray(sample_ids).tolist())}
    slots = np.full((len(plan.topology.stages), len(row_of)), -1, np.int64)
    for r, replica in enumerate(plan.replicas):
        for k, microbatch in enumerate(replica):
            for u, unit in enumerate(plan.topology.stages):
                for sample_id in microbatch.units[unit]:
                    if sample_id not in row_of:
                        raise ValueError(f"the plan has sample {sample_id}, which is not in the batch")
                    slots[u, row_of[sample_id]] = r * plan.topology.microbatches + k
    for unit, replicas in plan.unit_replicas.items():
        u = list(plan.topology.stages).index(unit)
        for r, microbatches in enumerate(replicas):
            for k, samples in enumerate(microbatches):
                for sample_id in samples:
                    slots[u, row_of[sample_id]] = r * plan.topology.microbatches + k
    if (slots < 0).any():
        row = int(np.argwhere(slots < 0)[0, 1])
        raise ValueError(f"the plan lacks sample {np.asarray(sample_ids)[row]} of the batch")
    return slots


def make_batch(
    sample_ids: NDArray[np.integer],
    costs: Mapping[str, Floats],
    topology: Topology,
    seed: int,
    *,
    execution: Execution | None = None,
    memory: Mapping[str, Floats] | None = None,
    transfer_bytes: Mapping[str, Floats] | None = None,
    tokens: Ints | None = None,
) -> Batch:
    """Check the planner's input and return it as a `Batch`.

    Raises ValueError with the unit, the row and the rule that it breaks.
    """
    ids = np.ascontiguousarray(sample_ids, dtype=np.int64)
    if ids.ndim != 1 or ids.size == 0:
        raise ValueError(f"a global batch is a list of at least one sample id, got an array of shape {ids.shape}")
    ordered = ids if (ids[1:] > ids[:-1]).all() else np.sort(ids)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise ValueError(f"sample ids must differ, but {twice[0]} stands in rows {np.flatnonzero(ids == twice[0]).tolist()}")
    execution = execution or Execution()
    unknown = (execution.backward_factors.keys() | execution.weight_gradient_factors.keys()) - topology.stages.keys()
    if unknown:
        raise ValueError(f"backward factors name no unit of {list(topology.stages)}: {sorted(unknown)}")
    if unknown := execution.post_balancing.forms.keys() - topology.stages.keys():
        raise ValueError(f"post-balancing forms name no unit of {list(topology.stages)}: {sorted(unknown)}")
    if wrong := execution.unit_replicas.keys() - (topology.stages.keys() - {LLM}):
        raise ValueError(f"unit_replicas are for units of {list(topology.stages)} but {LLM!r}, got {sorted(wrong)}")
    own = {unit: number for unit, number in execution.unit_replicas.items() if number != topology.replicas}
    execution = replace(execution, unit_replicas=own)
    matrix = _matrix("costs", "cost", costs, topology, ids.size)
    return Batch(
        sample_ids=ids,
        costs=matrix,
        memory=matrix if memory is None else _matrix("memory", "memory", memory, topology, ids.size),
        transfer_bytes=(
            np.zeros_like(matrix)
            if transfer_bytes is None
            else _matrix("transfer_bytes", "transfer", transfer_bytes, topology, ids.size)
        ),
        tokens=None if tokens is None else _counts("tokens", tokens, ids.size),
        topology=topology,
        seed=int(seed),
        execution=execution,
    )


def _counts(what: str, values: Ints, num_samples: int) -> Ints:
    counts = np.array(values, dtype=np.int64)  # a copy, that can be written to: kernels are compiled for such arrays
    if counts.shape != (num_samples,) or (counts < 0).any():
        raise ValueError(f"{what} must be one count per sample ({num_samples}), none negative, got shape {counts.shape}")
    return counts


def _matrix(what: str, one: str, columns: Mapping[str, Floats], topology: Topology, num_samples: int) -> Floats:
    if set(columns) != set(topology.stages):
        raise ValueError(f"{what} must have one column per unit of {sorted(topology.stages)}, got {sorted(columns)}")
    return np.stack([_column(f"{one} of unit {unit!r}", columns[unit], num_samples) for unit in topology.stages])


def _column(name: str, values: Floats, num_samples: int) -> Floats:
    column = np.asarray(values, dtype=np.float64)
    if column.shape != (num_samples,):
        raise ValueError(f"{name} must have one value per sample ({num_samples}), got shape {column.shape}")
    wrong = np.flatnonzero(~(np.isfinite(column) & (column >= 0)))
    if wrong.size:
        raise ValueError(f"{name} must be finite and not negative, but row {wrong[0]} is {column[wrong[0]]}")
    if column.max() > _LARGEST_SUM / num_samples:
        raise ValueError(f"{name} is too large to add up: row {column.argmax()} is {column.max()}")
    return column
