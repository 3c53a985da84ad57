"""Time of a step, by replaying its schedule: per-stage forward times in, start of every action out.

A microbatch's forward in a unit takes its cost there, spread evenly over the unit's stages; its backward takes
BACKWARD_FACTOR times as long. Replicas do not meet before the end of the step, so the slowest one is the step's time.
Transfers between stages take no time. Empty microbatches are left out of the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from headrace.plan import Predicted, StepPlan
from headrace.schedule import Scheduler, one_f_one_b
from reorder_service.planning.batch import Floats, Ints
from reorder_service.planning.kernel import kernel

BACKWARD_FACTOR = 2.0  # gradients of inputs and of weights: two matrix products for each one of the forward
_NOT_YET = -1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """What the D replicas of S stages have to do in their K microbatches."""

    forward_s: Floats
    """(D, K, S) forward seconds."""
    occupied: NDArray[np.bool_]
    """(D, K) whether the microbatch holds a sample at all."""

    @classmethod
    def of_units(cls, loads: Floats, occupied: NDArray[np.bool_], stages: Mapping[str, int]) -> Work:
        """Work from (D, K, U) forward seconds of whole units, in the order of `stages`."""
        counts = np.array(list(stages.values()))
        return cls(forward_s=np.repeat(loads / counts, counts, axis=2), occupied=occupied)

    @classmethod
    def of_plan(cls, plan: StepPlan, sample_ids: Ints, costs: Mapping[str, Floats]) -> Work:
        """Work of a plan, given the cost columns that belong to `sample_ids`."""
        row_of = {sample_id: row for row, sample_id in enumerate(np.asarray(sample_ids).tolist())}
        topology = plan.topology
        loads = np.zeros((topology.replicas, topology.microbatches, len(topology.stages)))
        occupied = np.zeros(loads.shape[:2], np.bool_)
        for r, replica in enumerate(plan.replicas):
            for k, microbatch in enumerate(replica):
                occupied[r, k] = any(microbatch.units.values())
                for u, unit in enumerate(topology.stages):
                    loads[r, k, u] = costs[unit][[row_of[i] for i in microbatch.units[unit]]].sum()
        return cls.of_units(loads, occupied, topology.stages)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """Every action of a step as columns of equal length, ordered by replica, then stage, then time."""

    replica: Ints
    stage: Ints
    microbatch: Ints
    kind: Ints
    """`headrace.schedule.Kind`"""
    start_s: Floats
    end_s: Floats


def simulate(work: Work, scheduler: Scheduler = one_f_one_b) -> Predicted:
    """Iteration time, idle share and lower bound of a step.

    `bubble`: share of the D * S stages' time up to the end of the slowest replica in which they are idle.
    `lower_bound_s`: the work of the busiest stage of any replica. No order of the microbatches is faster than that.
    """
    busy = (1 + BACKWARD_FACTOR) * np.where(work.occupied[:, :, None], work.forward_s, 0.0).sum(axis=1)
    makespans = [_makespans(forward, table) for _, forward, table in _alike(work, scheduler)]
    iteration = max(float(group.max()) for group in makespans)
    bubble = max(0.0, 1.0 - float(busy.sum()) / (busy.size * iteration)) if iteration > 0 else 0.0
    return Predicted(iteration_s=iteration, bubble=bubble, lower_bound_s=float(busy.max()))


def timeline(work: Work, scheduler: Scheduler = one_f_one_b) -> Timeline:
    """When every action of a step starts and ends, seen from the start of the step."""
    blocks: list[Floats] = []
    for replicas, forward, table in _alike(work, scheduler):
        stage, _ = np.indices(table.shape[1:])
        for i, replica in enumerate(replicas):
            starts, ends = np.zeros(stage.shape), np.zeros(stage.shape)
            _replay(forward[i], table, starts, ends)
            microbatch = np.flatnonzero(work.occupied[replica])[table[1]]
            columns = (np.full(stage.shape, replica), stage, microbatch, table[0], starts, ends)
            blocks.append(np.stack([column.ravel() for column in columns]))
    whole = np.concatenate(blocks, axis=1)
    whole = whole[:, np.argsort(whole[0], kind="stable")]
    replica, stage, microbatch, kind = whole[:4].astype(np.int64)
    return Timeline(replica=replica, stage=stage, microbatch=microbatch, kind=kind, start_s=whole[4], end_s=whole[5])


def _alike(work: Work, scheduler: Scheduler) -> Iterator[tuple[Ints, Floats, Ints]]:
    """Groups of replicas with equally many (m) non-empty microbatches: they share a schedule.

    Yields the replicas (R,), their forward times (R, m, S) without empty microbatches, and the schedule's table. Raises
    ValueError if that schedule waits for itself.
    """
    filled = work.occupied.sum(axis=1)
    first_filled = np.argsort(~work.occupied, axis=1, kind="stable")
    forward = np.take_along_axis(work.forward_s, first_filled[:, :, None], axis=1)
    for count in np.unique(filled).tolist():
        replicas = np.flatnonzero(filled == count)
        yield replicas, np.ascontiguousarray(forward[replicas, :count]), _table(scheduler, forward.shape[2], count)


@lru_cache(maxsize=64)
def _table(scheduler: Scheduler, num_stages: int, num_microbatches: int) -> Ints:
    """(2, S, A): kind and microbatch of every action. Raises ValueError if the schedule waits for itself."""
    schedule = scheduler(num_stages, range(num_microbatches))
    kinds = [[int(action.kind) for action in actions] for actions in schedule]
    microbatches = [[action.microbatch for action in actions] for actions in schedule]
    table = np.array([kinds, microbatches], dtype=np.int64).reshape(2, num_stages, -1)
    nowhere = np.zeros(table.shape[1:])
    if _replay(np.zeros((num_microbatches, num_stages)), table, nowhere, nowhere.copy()) > 0:
        raise ValueError(f"the schedule of {num_microbatches} microbatches on {num_stages} stages waits for itself")
    return table


@kernel
def _makespans(forward: Floats, table: Ints) -> Floats:
    """(R,) when each replica is done, for (R, m, S) forward times."""
    starts, ends = np.zeros(table.shape[1:]), np.zeros(table.shape[1:])
    makespans = np.zeros(forward.shape[0])
    if table.shape[2] == 0:
        return makespans
    for r in range(forward.shape[0]):
        _replay(forward[r], table, starts, ends)
        makespans[r] = ends[:, -1].max()
    return makespans


@kernel
def _replay(forward: Floats, table: Ints, starts: Floats, ends: Floats) -> int:
    """Fill starts and ends (S, A) of the table's actions for (m, S) forward times; returns how many could never start.

    Sweeps over the stages; each takes its next actions for as long as their inputs are there.
    """
    num_microbatches, num_stages = forward.shape
    num_actions = table.shape[2]
    done = np.full((2, num_stages, num_microbatches), _NOT_YET)
    cursor = np.zeros(num_stages, np.int64)
    left: int = num_stages * num_actions
    progress = True
    while progress:
        progress = False
        for s in range(num_stages):
            while cursor[s] < num_actions:
                a = cursor[s]
                kind, m = table[0, s, a], table[1, s, a]
                ready = _ready(done, kind, s, m)
                if ready == _NOT_YET:
                    break
                starts[s, a] = max(ready, ends[s, a - 1]) if a > 0 else ready
                ends[s, a] = starts[s, a] + forward[m, s] * (1.0 if kind == 0 else BACKWARD_FACTOR)
                done[kind, s, m] = ends[s, a]
                cursor[s] += 1
                left -= 1
                progress = True
    return left


@kernel
def _ready(done: Floats, kind: int, stage: int, microbatch: int) -> float:
    """When an action's input is there, or _NOT_YET."""
    ready = 0.0
    if kind == 1:
        behind = stage + 1
        ready = done[1, behind, microbatch] if behind < done.shape[1] else done[0, stage, microbatch]
    elif stage > 0:
        ready = done[0, stage - 1, microbatch]
    return ready
