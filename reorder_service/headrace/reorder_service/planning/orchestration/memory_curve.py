"""What a GPU of each stage holds over one global batch: its state, which is there all the time or a part of it, and activations.

Weights with their copies in bfloat16, and the optimizer's moments, are there from the start to the end. Gradients come with a
stage's first backward, and of its last one each replica keeps its share of their sum only (ZeRO-1). Activations come with the
forwards, and go with the actions that free them. So the most that a curve reaches is what the judge says of its stage, in that
batch. Colocated ranks share all gradients, and run the units of a microbatch one after the other, forth and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.held_activations import freed_by
from headrace.plan import LLM
from headrace.reorder_service.planning.batch import Floats
from headrace.reorder_service.planning.orchestration.candidate import Candidate
from headrace.reorder_service.planning.orchestration.demand import Demand
from headrace.reorder_service.planning.orchestration.estimate import memory_bytes
from headrace.reorder_service.planning.orchestration.judge import Simulated, room_bytes
from headrace.reorder_service.planning.orchestration.judgement import RankMemory
from headrace.reorder_service.planning.orchestration.shared_memory_curve import held_on_shared_ranks, host_stages
from headrace.reorder_service.planning.simulation.eager_depth import planned_work
from headrace.reorder_service.planning.simulation.simulator import Timeline, timeline
from headrace.reorder_service.planning.simulation.work import Work
from headrace.schedule import EAGER, Kind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryCurve:
    """Bytes on one GPU: each amount holds from its time on, until the next time; several times may be equal."""

    unit: str
    """Name of the unit, as in `RankMemory`."""
    stage: int
    replica: int
    """Of the stage's replicas, the one that holds most at a time."""
    time_s: Floats
    """(t,) ascending, from 0 to the end of the step."""
    weights: float
    optimizer: float
    gradients: Floats
    """(t,)."""
    activations: Floats
    """(t,)."""

    @property
    def total(self) -> Floats:
        """(t,) all of it."""
        total: Floats = self.weights + self.optimizer + self.gradients + self.activations
        return total

    @property
    def peak(self) -> float:
        """The most that it holds at a time."""
        return float(self.total.max())


def memory_curves(demand: Demand, candidate: Candidate, step: Simulated, ranks: Sequence[RankMemory]) -> tuple[MemoryCurve, ...]:
    """Return the curve of every stage of a candidate, in pipeline order, over a global batch that was simulated on it.

    ranks: what the judge says of the candidate's stages, of which the state is taken.
    """
    if candidate.placement == "colocated" and candidate.grids[LLM].pp == 1 and len(ranks) == 1:
        return (_of_rank(step, ranks[0]),)
    if candidate.sharing is not None:
        return _on_shared_ranks(demand, candidate, step, ranks)
    work = _work_of(demand, candidate, step)
    actions = timeline(work)
    units = [unit for unit, grid in candidate.grids.items() for _ in range(grid.pp)]
    return tuple(_of_stage(candidate, work, actions, place, units[place], rank, step.step_s) for place, rank in enumerate(ranks))


def _work_of(demand: Demand, candidate: Candidate, step: Simulated) -> Work:
    """Return the work that was simulated: an eager schedule is as deep as the memory of the candidate's GPUs allows."""
    if demand.schedule != EAGER:
        return planned_work(step.batch, step.slots)
    room = room_bytes(demand, candidate)
    scale = np.array([room[unit] for unit in step.batch.units])
    execution = replace(step.batch.execution, memory_limit=1.0)
    work = planned_work(replace(step.batch, memory=step.batch.memory / scale[:, None], execution=execution), step.slots)
    return replace(work, memory=work.memory * scale)


def _of_stage(
    candidate: Candidate, work: Work, actions: Timeline, place: int, unit: str, rank: RankMemory, step_s: float
) -> MemoryCurve:
    """place: of the stage among all stages. The replica is the one of the most activations, or the first of these."""
    of_stage = actions.stage == place
    held = np.zeros(candidate.grids[unit].dp)
    np.maximum.at(held, actions.replica[of_stage], actions.memory_after[of_stage])
    replica = int(held.argmax())
    own = of_stage & (actions.replica == replica)
    kind, start_s, end_s = actions.kind[own], actions.start_s[own], actions.end_s[own]
    has_weights = work.execution.factors(unit)[Kind.WEIGHT] > 0
    frees = freed_by(work.execution.schedule, has_weights=has_weights)
    counts = (kind == Kind.FORWARD) | (kind == frees)
    first_s = float(start_s[kind == frees].min(initial=step_s))
    last_s = max(first_s, float(end_s.max(initial=0.0)))
    return _curve(
        rank,
        replica,
        np.where(kind == Kind.FORWARD, start_s, end_s)[counts],
        actions.memory_after[own][counts],
        ((first_s, rank.gradients), (last_s, rank.gradients / candidate.grids[unit].dp)),
        step_s,
    )


def _on_shared_ranks(
    demand: Demand, candidate: Candidate, step: Simulated, ranks: Sequence[RankMemory]
) -> tuple[MemoryCurve, ...]:
    """Return the curves where encoders share the LLM's GPUs: gradients of each unit come with its own first backward there."""
    sizes = {unit: of.gradients for unit, of in memory_bytes(demand, candidate).items()}
    found = []
    for rank, held in zip(ranks, held_on_shared_ranks(candidate, step, host_stages(candidate)), strict=True):
        changes = [(first_s, sizes[unit]) for unit, first_s, _ in held.gradients]
        changes += [
            (max(first_s, last_s), sizes[unit] / candidate.grids[unit].dp - sizes[unit])
            for unit, first_s, last_s in held.gradients
        ]
        begin_s, amounts = np.array(sorted(changes)).T
        gradients = list(zip(begin_s.tolist(), np.cumsum(amounts).tolist(), strict=True))
        found.append(_curve(rank, held.replica, held.times_s, held.held, gradients, step.step_s))
    return tuple(found)


def _of_rank(step: Simulated, rank: RankMemory) -> MemoryCurve:
    """Return the curve of the colocated rank that holds the fullest microbatch, which waits for the others behind each.

    Microbatches take as long as their forward and backward on the slowest rank, and their parts of what is sent.
    """
    batch, count = step.batch, step.batch.topology.microbatches
    forward = batch.loads(step.slots)
    backward = forward * (batch.step_factors - 1)
    kept = np.stack(
        [np.bincount(slots, weights=one, minlength=batch.num_slots) for slots, one in zip(step.slots, batch.memory, strict=True)]
    )
    replica = int(kept.sum(axis=0).argmax()) // count
    slowest_s = (forward + backward).sum(axis=2).max(axis=0)
    starts_s = (slowest_s.cumsum() - slowest_s) * step.step_s / (float(slowest_s.sum()) or 1.0)
    own = np.concatenate((forward[replica], backward[replica, :, ::-1]), axis=1)  # (K, 2 U) seconds in turn
    ends_s = starts_s[:, None] + own.cumsum(axis=1)
    half = len(batch.units)
    times_s = np.where(np.arange(2 * half) < half, ends_s - own, ends_s)
    of_units = kept[:, replica * count : (replica + 1) * count].T
    changes = np.concatenate((of_units, -of_units[:, ::-1]), axis=1)
    first_s = float(ends_s[0, half - 1])
    return _curve(rank, replica, times_s.ravel(), np.maximum(changes.cumsum(), 0.0), ((first_s, rank.gradients),), step.step_s)


def _curve(
    rank: RankMemory, replica: int, times_s: Floats, held: Floats, gradients: Sequence[tuple[float, float]], step_s: float
) -> MemoryCurve:
    """times_s, held: (e,) when activations change, ascending, and to what. gradients: the same of these, as pairs."""
    begin_s, amounts = np.array(gradients).T
    at_s = np.concatenate(([0.0], times_s, begin_s, [step_s]))
    unchanged = np.full(len(gradients) + 1, np.nan)
    activations = np.concatenate(([0.0], held, unchanged))
    learnt = np.concatenate(([0.0], np.full(times_s.size, np.nan), amounts, [np.nan]))
    order = np.argsort(at_s, kind="stable")
    return MemoryCurve(
        unit=rank.unit,
        stage=rank.stage,
        replica=replica,
        time_s=at_s[order],
        weights=rank.weights,
        optimizer=rank.optimizer,
        gradients=_filled(learnt[order]),
        activations=_filled(activations[order]),
    )


def _filled(values: Floats) -> Floats:
    """Replace each NaN by the value in front of it; the first is none."""
    filled: Floats = values[np.maximum.accumulate(np.where(np.isnan(values), 0, np.arange(values.size)))]
    return filled
