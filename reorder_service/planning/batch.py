"""The planner's input, checked once, and its output in array form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.plan import Microbatch, Topology

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# (U, n): slot of every sample in every unit. Slot r * K + k is microbatch k of replica r. A sample has the same replica in
# all units; its slot differs between units only where it is deferred.
Slots = Ints

_LARGEST_SUM = 1e300  # a step's time is a small multiple of the sum of costs, and must be a number too


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """One global batch of n samples in arrival order, on U units."""

    sample_ids: Ints
    """(n,)"""
    costs: Floats
    """(U, n), C-contiguous: forward seconds of the whole unit, units in pipeline order."""
    topology: Topology
    seed: int

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the U units in pipeline order."""
        return tuple(self.topology.stages)

    @property
    def num_slots(self) -> int:
        """Microbatches of all replicas."""
        return self.topology.replicas * self.topology.microbatches

    def loads(self, slots: Slots) -> Floats:
        """(D, K, U) seconds of forward work per microbatch and unit."""
        loads = np.empty((self.num_slots, len(self.units)))
        for u, (slot, cost) in enumerate(zip(slots, self.costs, strict=True)):
            loads[:, u] = np.bincount(slot, weights=cost, minlength=self.num_slots)
        return loads.reshape(self.topology.replicas, self.topology.microbatches, len(self.units))

    def occupied(self, slots: Slots) -> NDArray[np.bool_]:
        """(D, K) whether any unit of the microbatch has a sample."""
        filled = np.zeros(self.num_slots, np.bool_)
        filled[slots.ravel()] = True
        return filled.reshape(self.topology.replicas, self.topology.microbatches)

    def microbatches(self, slots: Slots) -> tuple[tuple[Microbatch, ...], ...]:
        """The plan's `replicas`; samples of a microbatch stand in arrival order."""
        units, per_replica = self.units, self.topology.microbatches
        shared = self._grouped(slots[0])
        if (slots == slots[0]).all():
            flat = [Microbatch(units=dict.fromkeys(units, ids)) for ids in shared]
        else:
            groups = [shared, *(self._grouped(slot) for slot in slots[1:])]
            flat = [Microbatch(units=dict(zip(units, ids, strict=True))) for ids in zip(*groups, strict=True)]
        return tuple(tuple(flat[first : first + per_replica]) for first in range(0, len(flat), per_replica))

    def _grouped(self, slot: Ints) -> list[tuple[int, ...]]:
        ids = tuple(self.sample_ids[np.argsort(slot, kind="stable")].tolist())
        ends = np.cumsum(np.bincount(slot, minlength=self.num_slots)).tolist()
        return [ids[first:end] for first, end in zip([0, *ends[:-1]], ends, strict=True)]


def make_batch(sample_ids: NDArray[np.integer], costs: Mapping[str, Floats], topology: Topology, seed: int) -> Batch:
    """The checked batch. Raises ValueError with the unit, the row and the rule that it breaks."""
    ids = np.ascontiguousarray(sample_ids, dtype=np.int64)
    if ids.ndim != 1 or ids.size == 0:
        raise ValueError(f"a global batch is a list of at least one sample id, got an array of shape {ids.shape}")
    ordered = np.sort(ids)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise ValueError(f"sample ids must differ, but {twice[0]} stands in rows {np.flatnonzero(ids == twice[0]).tolist()}")
    if set(costs) != set(topology.stages):
        raise ValueError(f"costs must have one column per unit of {sorted(topology.stages)}, got {sorted(costs)}")
    columns = [_column(unit, costs[unit], ids.size) for unit in topology.stages]
    return Batch(sample_ids=ids, costs=np.stack(columns), topology=topology, seed=seed)


def _column(unit: str, values: Floats, num_samples: int) -> Floats:
    column = np.asarray(values, dtype=np.float64)
    if column.shape != (num_samples,):
        raise ValueError(f"cost of unit {unit!r} must have one value per sample ({num_samples}), got shape {column.shape}")
    wrong = np.flatnonzero(~(np.isfinite(column) & (column >= 0)))
    if wrong.size:
        raise ValueError(f"cost of unit {unit!r} must be finite and not negative, but row {wrong[0]} is {column[wrong[0]]}")
    if column.max() > _LARGEST_SUM / num_samples:
        raise ValueError(f"cost of unit {unit!r} is too large to add up: row {column.argmax()} is {column.max()}")
    return column
