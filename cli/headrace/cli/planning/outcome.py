"""A plan of one global batch together with its simulation: everything that tables, pictures and traces show."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.errors import UserError
from headrace.plan import GENERATOR, LLM, Predicted, StepPlan
from headrace.reorder_service.planning.batch import Batch, Floats, Ints, Slots, slots_of
from headrace.reorder_service.planning.simulation.eager_depth import planned_work
from headrace.reorder_service.planning.simulation.prediction import predict_step
from headrace.reorder_service.planning.simulation.shared_ranks import SharedStep, simulate_shared
from headrace.reorder_service.planning.simulation.simulator import Timeline, Work, peak_memory, timeline
from headrace.reorder_service.planning.strategies import plan_of
from headrace.reorder_service.planning.strategies.orchmllm import heaviest_between_nodes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """A plan of one global batch and its simulation: D replicas, K microbatches, S stages, U units, n samples.

    D is the number of replicas of the unit that has most of them.
    """

    plan: StepPlan
    batch: Batch
    slots: Slots
    """(U, n) slot of every sample in every unit, see `Slots`."""
    work: Work
    predicted: Predicted
    shared: SharedStep | None
    """What the ranks do in turns where units share them."""

    @classmethod
    def of(cls, plan: StepPlan, batch: Batch) -> Outcome:
        """Simulate `plan`, a plan of `batch`; the prediction that the plan itself carries is not used."""
        slots, sharing = slots_of(plan, batch.sample_ids), batch.execution.sharing
        return cls(
            plan=plan,
            batch=batch,
            slots=slots,
            work=planned_work(batch, slots),
            predicted=predict_step(batch, slots),
            shared=None if sharing is None else simulate_shared(batch, slots, sharing),
        )

    @property
    def stage_names(self) -> list[str]:
        """Names of the S stages: `llm` if that unit has one stage, otherwise `llm 0`, `llm 1`, ..."""
        return [unit if n == 1 else f"{unit} {i}" for unit, n in self.plan.topology.stages.items() for i in range(n)]

    @property
    def unit_of_stage(self) -> list[int]:
        """Index of the unit of each of the S stages."""
        return [u for u, n in enumerate(self.plan.topology.stages.values()) for _ in range(n)]

    @property
    def who_shares(self) -> str:
        """Which units share ranks, in words to add to a title; empty where none do."""
        if self.shared is None:
            return ""
        return f"; {' and '.join(sorted(self.shared.sharing.guests))} on the LLM's ranks, {self.shared.sharing.order}"

    @property
    def cut_units(self) -> frozenset[str]:
        """The units whose passes are cut into pieces."""
        pieces = self.shared.sharing.pieces if self.shared else {}
        return frozenset(unit for unit, number in pieces.items() if number > 1)

    def timeline(self) -> Timeline:
        """Return all actions of the simulated step with their times, where units share ranks without what these hold."""
        return timeline(self.work) if self.shared is None else self.shared.timeline(self.plan.topology.microbatches)

    def loads(self) -> Floats:
        """Return the (D, K, U) forward time of every microbatch in every whole unit."""
        return self.batch.loads(self.slots)

    def spread(self) -> dict[str, float]:
        """Return, by unit, how unequal the microbatches of its replicas are: the standard deviation of their loads over the mean.

        Only microbatches that hold samples of any unit count. It is 0 for a unit whose loads are all 0.
        """
        loads, occupied = self.loads(), self.batch.occupied(self.slots)
        spread = {}
        for u, (unit, replicas) in enumerate(zip(self.batch.units, self.batch.unit_replicas, strict=True)):
            of_unit = loads[:replicas, :, u][occupied[:replicas]]
            spread[unit] = float(of_unit.std() / of_unit.mean()) if of_unit.any() else 0.0
        return spread

    def peak_memory(self) -> Floats:
        """Return the (D, S) most activations that each stage holds at any time, in the unit of `Batch.memory`.

        Where units share ranks, it is what these hold of all of them.
        """
        return peak_memory(self.work) if self.shared is None else self.shared.peak_memory

    @property
    def fits(self) -> bool:
        """Whether every stage stays within the memory limit of the batch's execution."""
        return float(self.peak_memory().max()) <= self.batch.execution.memory_limit

    def num_filled(self) -> int:
        """Return the number of microbatches, over all replicas, that hold samples."""
        return int(self.batch.occupied(self.slots).sum())

    def num_moved(self) -> int:
        """Return the number of samples that different units process on different replicas."""
        replica = self.slots // self.plan.topology.microbatches
        return int((replica != replica[0]).any(axis=0).sum())

    def heaviest_between_nodes(self) -> dict[str, float]:
        """Return, by unit, the most that one rank sends to the LLM on other nodes; empty if nodes are not known."""
        known = self.batch.execution.post_balancing.ranks_per_node > 0
        return heaviest_between_nodes(self.batch, self.slots) if known else {}

    def deferred(self) -> NDArray[np.bool_]:
        """Return (U, n) whether the unit behind this one takes the sample in a later microbatch."""
        units, index = self.batch.units, self.slots % self.plan.topology.microbatches
        llm = index[units.index(LLM)]
        behind = index[units.index(GENERATOR)] if GENERATOR in units else llm
        return np.stack([index[u] < (llm if unit not in (LLM, GENERATOR) else behind) for u, unit in enumerate(units)])

    def num_deferred(self) -> int:
        """Return the number of samples that are deferred between any two units."""
        return int(self.deferred().any(axis=0).sum())

    def num_samples(self, where: NDArray[np.bool_] | None = None) -> Ints:
        """Return the (U, D, K) number of samples in every microbatch of every unit.

        where: (U, n) mask of the samples to count; None counts all.
        """
        count = [
            np.bincount(slot if where is None else slot[where[u]], minlength=self.batch.num_slots)
            for u, slot in enumerate(self.slots)
        ]
        return np.stack(count).reshape(len(count), -1, self.plan.topology.microbatches).astype(np.int64)

    def slowest(self, most: int) -> list[int]:
        """Return the sorted indices of the `most` replicas that end last.

        Among replicas that end at the same time, those with more actions on the critical path are preferred.
        """
        actions = self.timeline()
        ends = np.zeros(self.batch.most_replicas)
        np.maximum.at(ends, actions.replica, actions.end_s)
        critical = np.bincount(actions.replica[actions.critical], minlength=ends.size)
        return sorted(np.lexsort((-critical, -ends))[:most].tolist())


def time_ratio(above_s: float, below_s: float) -> float:
    """Return above_s / below_s, or 1 if nothing costs anything and below_s is 0."""
    return above_s / below_s if below_s > 0 else 1.0


def plan_timed(batch: Batch, strategy: str) -> tuple[StepPlan, float]:
    """Plan a batch, and return the plan and the seconds that planning takes. Raises UserError.

    The batch is planned twice and the second time counts, when kernels are compiled and schedules are cached.
    """
    try:
        plan_of(strategy, batch)
    except ValueError as err:
        raise UserError(str(err)) from err
    start_s = time.perf_counter()
    plan = plan_of(strategy, batch)
    return plan, time.perf_counter() - start_s
