"""A plan of one global batch together with what the simulator says of it: all that tables, pictures and traces show."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.errors import UserError
from headrace.plan import GENERATOR, LLM, Predicted, StepPlan
from headrace.reorder_service.planning.batch import Batch, Floats, Ints, Slots, slots_of
from headrace.reorder_service.planning.simulation.simulator import Timeline, Work, peak_memory, simulate, timeline
from headrace.reorder_service.planning.strategies import plan_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """One plan. D replicas, K microbatches, S stages, U units, n samples."""

    plan: StepPlan
    batch: Batch
    slots: Slots
    """(U, n)"""
    work: Work
    predicted: Predicted

    @classmethod
    def of(cls, plan: StepPlan, batch: Batch) -> Outcome:
        """What the simulator says of `plan`; the plan's own prediction is not read."""
        slots = slots_of(plan, batch.sample_ids)
        work = Work.of(batch, slots)
        return cls(plan=plan, batch=batch, slots=slots, work=work, predicted=simulate(work))

    @property
    def stage_names(self) -> list[str]:
        """(S) `llm` where a unit has one stage, else `llm 0`, `llm 1`, ..."""
        return [unit if n == 1 else f"{unit} {i}" for unit, n in self.plan.topology.stages.items() for i in range(n)]

    @property
    def unit_of_stage(self) -> list[int]:
        """(S)"""
        return [u for u, n in enumerate(self.plan.topology.stages.values()) for _ in range(n)]

    def timeline(self) -> Timeline:
        """Every action of the step."""
        return timeline(self.work)

    def loads(self) -> Floats:
        """(D, K, U) forward time of whole units."""
        return self.batch.loads(self.slots)

    def spread(self) -> dict[str, float]:
        """By unit: standard deviation over mean of the loads of the microbatches that hold samples; 0 where all are 0."""
        loads = self.loads()[self.batch.occupied(self.slots)]
        mean = loads.mean(axis=0)
        relative = np.divide(loads.std(axis=0), mean, out=np.zeros_like(mean), where=mean > 0)
        return dict(zip(self.batch.units, relative.tolist(), strict=True))

    def peak_memory(self) -> Floats:
        """(D, S)"""
        return peak_memory(self.work)

    @property
    def fits(self) -> bool:
        """Whether every stage keeps the memory limit."""
        return float(self.peak_memory().max()) <= self.batch.execution.memory_limit

    def num_filled(self) -> int:
        """Microbatches of all replicas that hold samples."""
        return int(self.batch.occupied(self.slots).sum())

    def num_moved(self) -> int:
        """Samples whose units lie on different replicas."""
        replica = self.slots // self.plan.topology.microbatches
        return int((replica != replica[0]).any(axis=0).sum())

    def deferred(self) -> NDArray[np.bool_]:
        """(U, n) whether the sample's next unit, counted from this one, takes it in a later microbatch."""
        units, index = self.batch.units, self.slots % self.plan.topology.microbatches
        llm = index[units.index(LLM)]
        behind = index[units.index(GENERATOR)] if GENERATOR in units else llm
        return np.stack([index[u] < (llm if unit not in (LLM, GENERATOR) else behind) for u, unit in enumerate(units)])

    def num_deferred(self) -> int:
        """Samples that are deferred at all."""
        return int(self.deferred().any(axis=0).sum())

    def samples(self, where: NDArray[np.bool_] | None = None) -> Ints:
        """(U, D, K) number of samples, of those that the (U, n) mask `where` has."""
        topology = self.plan.topology
        count = [
            np.bincount(slot if where is None else slot[where[u]], minlength=self.batch.num_slots)
            for u, slot in enumerate(self.slots)
        ]
        return np.stack(count).reshape(len(count), topology.replicas, topology.microbatches).astype(np.int64)

    def slowest(self, most: int) -> list[int]:
        """At most so many replicas, by index: those that end last, and of these the ones on the critical path."""
        actions = self.timeline()
        ends = np.zeros(self.plan.topology.replicas)
        np.maximum.at(ends, actions.replica, actions.end_s)
        critical = np.bincount(actions.replica[actions.critical], minlength=ends.size)
        return sorted(np.lexsort((-critical, -ends))[:most].tolist())


def plan_timed(batch: Batch, strategy: str) -> tuple[StepPlan, float]:
    """The plan, and how many seconds planning takes once code is compiled and schedules are cached. Raises UserError."""
    try:
        plan_of(strategy, batch)
    except ValueError as err:
        raise UserError(str(err)) from err
    start_s = time.perf_counter()
    plan = plan_of(strategy, batch)
    return plan, time.perf_counter() - start_s
