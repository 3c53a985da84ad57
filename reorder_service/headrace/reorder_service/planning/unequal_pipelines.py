"""A plan for pipelines that are not alike, such as the ones that are left after a node was lost.

The samples are shared out so that all pipelines are predicted to end together, and then each pipeline's share is planned by the
job's strategy as a global batch of one replica: order, deferral and balance hold within each pipeline, and no sample changes its
pipeline. The shares follow a model of a pipeline's time, which is corrected by the simulated times of the plans made from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.jit import kernel
from headrace.plan import Microbatch, Predicted, StepPlan, Topology
from headrace.reorder_service.planning.batch import Batch, Floats, Ints, Slots, slots_of
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.search.number_partition import descending
from headrace.reorder_service.planning.simulation.eager_depth import planned_work
from headrace.reorder_service.planning.simulation.simulator import simulate
from headrace.reorder_service.planning.simulation.work import Work, longest_way
from headrace.reorder_service.planning.strategies import run_strategy

_ROUNDS = 3  # of sharing out and planning; the first ones correct the model most
_LEVEL = 0.01  # by which the longest pipeline may exceed the mean of all, so that no further round is made
_TRIES = 300_000  # exchanges of samples between two pipelines that are tried, at most: 30 ms
_LEAST_GAIN = 1e-9  # relative; less may be a rounding error


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """The stages of one pipeline, and how many microbatches it takes.

    Raises ValueError where the shares of a unit do not add up to 1, or the number of microbatches is negative.
    """

    stages: Mapping[str, tuple[float, ...]]
    """The share of a unit's time that each of its stages takes, by unit in pipeline order."""
    microbatches: int
    """0 for a pipeline that takes none, since it lacks a node."""

    def __post_init__(self) -> None:
        if self.microbatches < 0:
            raise ValueError(f"a pipeline takes 0 or more microbatches, got {self.microbatches}")
        for unit, shares in self.stages.items():
            if min(shares, default=-1.0) < 0 or abs(sum(shares) - 1) > 1e-6:
                raise ValueError(f"the shares of the stages of unit {unit!r} must add up to 1, none negative, got {shares}")

    @property
    def topology(self) -> Topology:
        """The topology of this pipeline alone."""
        return Topology(
            replicas=1, microbatches=self.microbatches, stages={unit: len(shares) for unit, shares in self.stages.items()}
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Share:
    """The plan of one pipeline's samples."""

    microbatches: tuple[Microbatch, ...]
    strategy: str
    work: Work | None
    """None for a pipeline without samples."""
    predicted: Predicted


def plan_for_pipelines(strategy: str, batch: Batch, pipelines: Sequence[PipelineShape], generation: int = 1) -> StepPlan:
    """Plan a batch for these pipelines: replica r of the plan is pipeline r, with as many microbatches as it takes.

    The batch's own topology names the units, and is not used otherwise. Raises ValueError where no pipeline takes a microbatch,
    and as `run_strategy`.
    """
    if not any(pipeline.microbatches for pipeline in pipelines):
        raise ValueError(f"none of {len(pipelines)} pipelines takes a microbatch")
    slowness = np.ones(len(pipelines))
    best: list[_Share] = []
    names = [strategy] * len(pipelines)
    for _ in range(_ROUNDS):
        owner, modelled_s = _share_out(batch, pipelines, slowness)
        shares = [
            _plan_one(name, batch, pipeline, np.flatnonzero(owner == p))
            for p, (name, pipeline) in enumerate(zip(names, pipelines, strict=True))
        ]
        names = [share.strategy or strategy for share in shares]  # what `auto` has chosen, it does not try again
        simulated_s = np.array([share.predicted.iteration_s for share in shares])
        if not best or simulated_s.max() < _longest_s(best):
            best = shares
        busy = simulated_s > 0
        if not busy.any() or simulated_s.max() <= (1 + _LEVEL) * simulated_s[busy].mean():
            break
        slowness[busy] *= simulated_s[busy] / modelled_s[busy]
    depths = [share.work.execution.in_flight for share in best if share.work is not None]
    in_flight = min((depth for depth in depths if depth is not None), default=None)
    best = [_as_deep(share, in_flight) for share in best]
    chosen = "+".join(dict.fromkeys(share.strategy for share in best if share.strategy))
    return StepPlan(
        strategy=strategy,
        seed=batch.seed,
        generation=generation,
        topology=Topology(
            replicas=len(pipelines),
            microbatches=max(pipeline.microbatches for pipeline in pipelines),
            stages=batch.topology.stages,
        ),
        replicas=tuple(share.microbatches for share in best),
        predicted=_together(batch, pipelines, best),
        chosen="" if chosen == strategy else chosen,
        in_flight=in_flight,
    )


def for_pipelines(execution: Execution) -> Execution:
    """Return the execution of a job as that of its pipelines: each has every unit once, and stages of its own."""
    return replace(execution, unit_replicas={}, stage_loads={})


def pipelines_s(batch: Batch, plan: StepPlan, pipelines: Sequence[PipelineShape]) -> float:
    """Return the simulated seconds of a batch's plan that `plan_for_pipelines` has made for these pipelines."""
    shares = shares_of(batch, plan, pipelines)
    return max((simulate(simulated_work(part, slots, shape)).iteration_s for part, slots, shape in shares), default=0.0)


def shares_of(batch: Batch, plan: StepPlan, pipelines: Sequence[PipelineShape]) -> Iterator[tuple[Batch, Slots, PipelineShape]]:
    """Yield what each of these pipelines has of a batch's plan: its samples as a batch of one replica, and their slots."""
    slots, microbatches = slots_of(plan, batch.sample_ids), plan.topology.microbatches
    for p, shape in enumerate(pipelines):
        rows = np.flatnonzero(slots[0] // microbatches == p)
        if rows.size:
            yield _part(batch, rows, shape), slots[:, rows] - p * microbatches, shape


def _part(batch: Batch, rows: Ints, shape: PipelineShape) -> Batch:
    """Return the samples of one pipeline as a batch of one replica, with memory as on each unit's fullest stage."""
    part = batch.of_rows(rows, shape.topology)
    if math.isinf(batch.execution.memory_limit):
        return part
    fullest = np.array([max(of_unit) * len(of_unit) for of_unit in shape.stages.values()])
    return replace(part, memory=part.memory * fullest[:, None])


def simulated_work(batch: Batch, slots: Slots, shape: PipelineShape) -> Work:
    """Return the work of a plan of one pipeline as its stages do it: each takes its share of a unit's time.

    Parts of a microbatch on two neighbouring stages overlap as they do on the unit's shortest stage.
    """
    work = planned_work(batch, slots)
    shares = [np.array(of_unit) * len(of_unit) for of_unit in shape.stages.values()]
    links = work.links
    if links is not None:
        least = np.array([of_unit.min() for of_unit in shares])
        hop_s = np.where(links.hop_s < 0, links.hop_s * least, links.hop_s)
        delay_s = np.where(links.delay_s < 0, links.delay_s * least[:-1, None], links.delay_s)
        links = replace(links, hop_s=hop_s, delay_s=delay_s)
    return replace(work, seconds=np.ascontiguousarray(work.seconds * np.concatenate(shares)[:, None]), links=links)


def _plan_one(strategy: str, batch: Batch, shape: PipelineShape, rows: Ints) -> _Share:
    if not rows.size:
        nothing = Microbatch(units=dict.fromkeys(batch.units, ()))
        idle = Predicted(iteration_s=0.0, bubble=0.0, lower_bound_s=0.0)
        return _Share(microbatches=(nothing,) * shape.microbatches, strategy="", work=None, predicted=idle)
    part = _part(batch, rows, shape)
    name, slots = run_strategy(strategy, part)
    work = simulated_work(part, slots, shape)
    return _Share(microbatches=part.replicas(slots)[0], strategy=name, work=work, predicted=simulate(work))


def _as_deep(share: _Share, in_flight: int | None) -> _Share:
    """Return the share with so many microbatches in flight: a plan has one depth for all pipelines."""
    if share.work is None or share.work.execution.in_flight == in_flight:
        return share
    work = replace(share.work, execution=replace(share.work.execution, in_flight=in_flight))
    return replace(share, work=work, predicted=simulate(work))


def _longest_s(shares: Sequence[_Share]) -> float:
    return max(share.predicted.iteration_s for share in shares)


def _together(batch: Batch, pipelines: Sequence[PipelineShape], shares: Sequence[_Share]) -> Predicted:
    """Return the prediction for all pipelines together, which meet at the step's end.

    The lower bound is that of work that can be cut at will: every unit's seconds, spread over the pipelines in proportion to the
    speeds of their busiest stages of that unit; or the longest way of one sample.
    """
    longest_s = _longest_s(shares)
    stages = sum(len(of_unit) for pipeline in pipelines for of_unit in pipeline.stages.values())
    works = [share.work for share in shares if share.work is not None]
    busy_s = sum(float(work.seconds.sum()) for work in works)
    taking = [pipeline for pipeline in pipelines if pipeline.microbatches]
    speeds = np.array([sum(1 / max(pipeline.stages[unit]) for pipeline in taking) for unit in batch.units])
    spread_s = float((batch.costs.sum(axis=1) * batch.step_factors / speeds).max())
    return Predicted(
        iteration_s=longest_s,
        bubble=max(0.0, 1 - busy_s / (stages * longest_s)) if longest_s else 0.0,
        lower_bound_s=min(longest_s, max(spread_s, longest_way(batch))),
    )


def _share_out(batch: Batch, pipelines: Sequence[PipelineShape], slowness: Floats) -> tuple[Ints, Floats]:
    """Share the samples out: (n,) pipeline of each sample, and (P,) the modelled seconds of the pipelines.

    slowness: (P,) factors by which pipelines take longer than modelled. A pipeline takes as long as its busiest stage, and once
    more the way of a mean microbatch through its other stages; its encoders work at the same time.
    """
    busiest = np.array([[max(pipeline.stages[unit]) for unit in batch.units] for pipeline in pipelines])
    microbatches = np.array([pipeline.microbatches for pipeline in pipelines], np.float64)
    seconds = np.ascontiguousarray((batch.costs * batch.step_factors[:, None]).T)
    order = descending(seconds.sum(axis=1))
    return _level(seconds, order, busiest, microbatches, slowness, len(batch.topology.encoders))


@kernel
def _modelled(load: Floats, busiest: Floats, microbatches: float, slowness: float, num_encoders: int) -> float:
    """Seconds of a pipeline whose units have these (U,) seconds to do; infinite where it takes no microbatch."""
    if microbatches == 0:
        return np.inf
    pace, way, encoder = 0.0, 0.0, 0.0
    for u in range(load.size):
        pace = max(pace, load[u] * busiest[u])
        if u < num_encoders:
            encoder = max(encoder, load[u])
        else:
            way += load[u]
    return float(slowness * (pace + max(0.0, encoder + way - pace) / microbatches))


@kernel
def _level(
    seconds: Floats, order: Ints, busiest: Floats, microbatches: Floats, slowness: Floats, num_encoders: int
) -> tuple[Ints, Floats]:
    """Give each sample to the pipeline that would then end first (LPT), and let the last pipeline exchange samples with others.

    seconds: (n, U). order: (n,) samples by falling seconds. busiest: (P, U) share of a unit's time that its busiest stage takes.
    Returns (n,) pipelines and (P,) their modelled seconds. O(n P), and _TRIES exchanges.
    """
    num_pipelines, num_units = busiest.shape
    loads = np.zeros((num_pipelines, num_units))
    ends = np.zeros(num_pipelines)
    nothing = np.zeros(num_units)
    owner = np.empty(order.size, np.int64)
    for i in order:
        best, earliest = -1, np.inf
        for p in range(num_pipelines):
            end = _modelled(loads[p] + seconds[i], busiest[p], microbatches[p], slowness[p], num_encoders)
            if end < earliest or best < 0:
                best, earliest = p, end
        owner[i] = best
        loads[best] += seconds[i]
        ends[best] = earliest
    shape = busiest, microbatches, slowness, num_encoders
    left = _TRIES
    while left > 0:
        last = int(ends.argmax())
        gone = np.flatnonzero(owner == last)
        left -= gone.size * (order.size - gone.size + num_pipelines)
        least, give, take, to = ends[last] * (1 - _LEAST_GAIN), -1, -1, -1
        for i in gone if left > 0 else gone[:0]:
            for p in range(num_pipelines):
                if p != last:
                    end = _after(loads, last, p, seconds[i], nothing, *shape)
                    if end < least:
                        least, give, take, to = end, i, -1, p
            for j in range(order.size):
                if owner[j] != last:
                    end = _after(loads, last, owner[j], seconds[i], seconds[j], *shape)
                    if end < least:
                        least, give, take, to = end, i, j, owner[j]
        if give < 0:
            break
        change = seconds[give] - (seconds[take] if take >= 0 else nothing)
        loads[last] -= change
        loads[to] += change
        owner[give] = to
        if take >= 0:
            owner[take] = last
        for p in (last, to):
            ends[p] = _modelled(loads[p], busiest[p], microbatches[p], slowness[p], num_encoders)
    return owner, ends


@kernel
def _after(
    loads: Floats,
    last: int,
    other: int,
    given: Floats,
    taken: Floats,
    busiest: Floats,
    microbatches: Floats,
    slowness: Floats,
    num_encoders: int,
) -> float:
    """Seconds of the longer one of two pipelines once the last one has given a sample to the other, and taken one for it."""
    change = given - taken
    here = _modelled(loads[last] - change, busiest[last], microbatches[last], slowness[last], num_encoders)
    there = _modelled(loads[other] + change, busiest[other], microbatches[other], slowness[other], num_encoders)
    return max(here, there)
