"""The judge: real global batches, planned by a strategy on a candidate's pipelines and simulated, with memory and exchange."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.plan import GENERATOR, LLM, Topology
from headrace.reorder_service.planning.batch import Batch, Floats, Ints, Slots, make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.orchestration.candidate import Candidate
from headrace.reorder_service.planning.orchestration.demand import Demand, UnitDemand
from headrace.reorder_service.planning.orchestration.estimate import (
    exchange_s,
    exposed_exchange_s,
    memory_bytes,
    microbatch_samples,
    update_s,
    usable_bytes,
)
from headrace.reorder_service.planning.orchestration.exchange import gathering_s, sharded_state
from headrace.reorder_service.planning.orchestration.judgement import (
    EXCHANGE,
    IDLE,
    MODEL,
    PARTS,
    SERVICES,
    SLICES,
    TRANSFERS,
    UPDATE,
    WAITING,
    Judgement,
    RankMemory,
)
from headrace.reorder_service.planning.orchestration.links import exposed_s
from headrace.reorder_service.planning.orchestration.shared_cores import beside_services_s, computing_of
from headrace.reorder_service.planning.orchestration.stage_cuts import layer_share, stage_times, time_share
from headrace.reorder_service.planning.sharing import Sharing
from headrace.reorder_service.planning.simulation.eager_depth import planned_work
from headrace.reorder_service.planning.simulation.shared_ranks import simulate_shared
from headrace.reorder_service.planning.simulation.simulator import peak_memory, simulate
from headrace.reorder_service.planning.strategies import AUTO, run_strategy
from headrace.schedule import EAGER, Kind

QUICK_STRATEGIES = ("orchmllm", "entrain", "disttrain")
"""What `auto` chooses among where plans are quick: on ranks that units share, and in large global batches. The first one is the
nearest to the best as a rule."""
_TAKEN_APART = 1
"""Batches whose time is taken apart, which takes two more simulations each; the parts are scaled to the mean step."""
_LEAST_ROOM = 1.0  # bytes for activations where the state alone fills a GPU: the plan is then the leanest there is


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulated:
    """One global batch on a candidate's pipelines."""

    batch: Batch
    """Its memory is in bytes."""
    slots: Slots
    strategy: str
    step_s: float
    """Without the update of the weights."""
    peaks: Floats
    """(S,) most bytes of activations that any replica of each stage holds, of all units on its GPUs; one entry on colocated
    ranks."""


def draw_batches(demand: Demand, count: int, seed: int) -> Ints:
    """Draw `count` global batches from the samples of a demand: (count, B) rows of them, in shuffled epochs."""
    generator, needed = np.random.default_rng(seed), count * demand.global_batch
    epochs = [generator.permutation(demand.num_samples) for _ in range(math.ceil(needed / demand.num_samples))]
    rows: Ints = np.concatenate(epochs)[:needed].reshape(count, demand.global_batch)
    return rows


def judge(
    demand: Demand, candidate: Candidate, batches: Ints, strategy: str = AUTO, seed: int = 0, *, quick: bool = False
) -> Judgement:
    """Simulate a candidate on (b, B) global batches, each planned by the strategy.

    quick: for sorting out; the time is not taken apart then, and see `simulated`. Raises ValueError where no plan of the strategy
    can be run with the demand's schedule.
    """
    steps = [simulated(demand, candidate, rows, strategy, seed, quick=quick) for rows in batches]
    return judgement_of(demand, candidate, batches, steps, strategy, is_apart=not quick)


def judgement_of(
    demand: Demand, candidate: Candidate, batches: Ints, steps: Sequence[Simulated], strategy: str, *, is_apart: bool
) -> Judgement:
    """Return what is said of a candidate by the steps of (b, B) global batches that were simulated on it, as `judge` does.

    is_apart: whether the time is taken apart.
    """
    seconds = np.array([_seconds(demand, candidate, step) for step in steps])
    parts = _parts(demand, candidate, batches, steps, seconds) if is_apart else dict.fromkeys(PARTS, 0.0)
    peaks = np.max([step.peaks for step in steps], axis=0)
    chosen = {step.strategy for step in steps}
    return Judgement(
        candidate=candidate,
        strategy=strategy if len(chosen) > 1 else chosen.pop(),
        steps_s=seconds,
        parts=parts,
        ranks=_ranks(demand, candidate, peaks),
        memory_bytes=usable_bytes(demand.cluster),
    )


def _seconds(demand: Demand, candidate: Candidate, step: Simulated) -> float:
    """Return the seconds of a step with the update of the weights, and with services where these are on the trainers' cores."""
    behind_s = update_s(demand, candidate)
    if demand.cluster.cores_per_node is None:
        return step.step_s + behind_s
    sharing = None if candidate.sharing is None else sharing_of(candidate)
    computing = computing_of(candidate, step.batch, step.slots, sharing, step.step_s)
    return beside_services_s(demand.cluster, computing, step.step_s, behind_s, demand.global_batch, candidate.gpus)


def simulated(
    demand: Demand, candidate: Candidate, rows: Ints, strategy: str = AUTO, seed: int = 0, *, quick: bool = False
) -> Simulated:
    """Plan and simulate one global batch, given by the (B,) rows of its samples.

    quick: a batch whose activations do not fit is not planned again under a limit of memory, which takes long, and one of
    colocated ranks is planned by LPT. Where encoders are on the LLM's GPUs, no batch is planned again, and `auto` takes the best
    of few strategies. Raises ValueError as `judge` does.
    """
    batch = batch_of(demand, candidate, rows, seed)
    if candidate.placement == "colocated":
        chosen, slots = run_strategy("disttrain" if quick else AUTO, batch)
        return Simulated(
            batch=batch,
            slots=slots,
            strategy=chosen,
            step_s=_colocated_s(demand, batch, slots, gathering_s(demand, candidate)),
            peaks=np.array([max(np.bincount(slots[0], weights=batch.memory.sum(axis=0)))]),
        )
    if candidate.sharing is not None:
        return _on_shared_ranks(candidate, batch, strategy)
    if demand.schedule != EAGER:
        chosen, slots = run_strategy(strategy, batch)
        work = planned_work(batch, slots)
        step = Simulated(
            batch=batch,
            slots=slots,
            strategy=chosen,
            step_s=simulate(work).iteration_s,
            peaks=peak_memory(work).max(axis=0),
        )
        if quick or keeps_within(demand, candidate, step):
            return step
    room = room_bytes(demand, candidate)
    scale = np.array([room[unit] for unit in batch.units])[:, None]
    limited = replace(batch, memory=batch.memory / scale, execution=replace(batch.execution, memory_limit=1.0))
    chosen, slots = run_strategy(strategy, limited)
    work = planned_work(limited, slots)
    peaks = peak_memory(work).max(axis=0) * _by_stage(candidate, room)
    return Simulated(batch=batch, slots=slots, strategy=chosen, step_s=simulate(work).iteration_s, peaks=peaks)


def keeps_within(demand: Demand, candidate: Candidate, step: Simulated) -> bool:
    """Return whether a step on pipelines whose units share no GPUs keeps within their memory, and need not be planned anew."""
    return bool((step.peaks <= _by_stage(candidate, room_bytes(demand, candidate))).all())


def batch_of(demand: Demand, candidate: Candidate, rows: Ints, seed: int = 0) -> Batch:
    """Return a global batch, given by its (B,) rows, on a candidate's pipelines, with memory in bytes and without a limit.

    All stages of a unit keep as much as the one with most layers.
    """
    units = {unit.name: unit for unit in demand.units}
    grids = candidate.grids
    fullest = {name: grids[name].pp * float(layer_share(unit, grids[name].pp)) for name, unit in units.items()}
    topology = Topology(
        replicas=grids[LLM].dp, microbatches=candidate.microbatches, stages={unit: grids[unit].pp for unit in units}
    )
    return make_batch(
        np.arange(rows.size),
        {name: unit.forward_s[grids[name].tp][rows] for name, unit in units.items()},
        topology,
        seed,
        execution=execution_of(demand, candidate),
        memory={name: unit.kept_bytes[grids[name].tp][rows] * fullest[name] for name, unit in units.items()},
        transfer_bytes={name: unit.sent_bytes[rows] for name, unit in units.items()},
    )


def execution_of(demand: Demand, candidate: Candidate) -> Execution:
    """Return how a candidate's pipelines run, without a limit of memory."""
    factors = {unit.name: unit.backward_factor for unit in demand.units}
    if candidate.placement == "colocated":
        return Execution(colocated="microbatch", backward_factors=factors)
    cluster = demand.cluster
    across = candidate.gpus > cluster.gpus_per_node
    execution = Execution(
        schedule=demand.schedule,
        chunks=demand.chunks,
        in_flight=candidate.in_flight,
        backward_factors=factors,
        stage_loads={unit.name: stage_loads(unit, candidate.grids[unit.name].pp, demand.chunks) for unit in demand.units},
        exchange_s={unit: seconds for unit, seconds in _exchange(demand, candidate).items() if sum(seconds) > 0},
        latency_s=cluster.latency_s,
        bytes_per_s=cluster.inter_node_bytes_per_s if across else cluster.intra_node_bytes_per_s,
        may_cross_replicas=True,
        unit_replicas={unit: grid.dp for unit, grid in candidate.grids.items() if grid.dp != candidate.grids[LLM].dp},
    )
    fixed = {unit.name: unit.microbatch_s for unit in demand.units if sum(unit.microbatch_s) > 0}
    return replace(execution, microbatch_s={unit: execution.by_kind(unit, *seconds) for unit, seconds in fixed.items()})


def _exchange(demand: Demand, candidate: Candidate) -> dict[str, tuple[float, float]]:
    """Return by unit the seconds of the exchange of weights and of gradients that a mean microbatch's computing does not hide.

    Where units share GPUs, the LLM's weights come behind those of the encoders, and a generator's behind the LLM's.
    """
    found, in_front_s = {}, 0.0
    for unit in demand.units:
        grid = candidate.grids[unit.name]
        shape = demand.cluster, grid.dp, grid.tp, grid.pp
        samples = microbatch_samples(demand, candidate, unit.name)
        forward_s = samples * float(unit.forward_s[grid.tp].mean()) * float(time_share(unit, grid.pp))
        first, last = exposed_exchange_s(unit, *shape, forward_s)
        found[unit.name] = float(first), float(last)
        if unit.name in (LLM, GENERATOR) and unit.name in (*candidate.guests, LLM):
            found[unit.name] = float(first) + in_front_s, float(last)
        if unit.name in (*candidate.guests, LLM):
            in_front_s += float(exchange_s(unit, *shape))
    return found


def stage_loads(unit: UnitDemand, stages: int, chunks: int = 1) -> list[list[float]]:
    """Return the time of each stage of a unit over an even share, for every kind of action: see `stage_cuts`."""
    return [[load] * len(Kind) for load in stage_times(unit, stages, chunks)]


def sharing_of(candidate: Candidate) -> Sharing:
    """Return how encoders share the LLM's GPUs. The candidate's placement must be one that does."""
    assert candidate.sharing is not None, "of placements with shared GPUs only"
    return Sharing(
        order=candidate.sharing,
        slices={unit: candidate.grids[unit].tp for unit in (*candidate.guests, LLM)},
        pieces=dict.fromkeys(candidate.guests, candidate.pieces) if candidate.pieces > 1 else {},
    )


def room_bytes(demand: Demand, candidate: Candidate) -> Mapping[str, float]:
    """Return the bytes that each unit's GPUs have left for activations, at least one."""
    memory = memory_bytes(demand, candidate)
    state = {unit: of.weights + of.gradients + of.optimizer for unit, of in memory.items()}
    together = sum(state[unit] for unit in (*candidate.guests, LLM))
    shared = dict.fromkeys((*candidate.guests, LLM), together)
    usable = usable_bytes(demand.cluster)
    return {unit: max(_LEAST_ROOM, usable - taken) for unit, taken in (state | shared).items()}


def _by_stage(candidate: Candidate, of_unit: Mapping[str, float]) -> Floats:
    return np.repeat([of_unit[unit] for unit in candidate.grids], [grid.pp for grid in candidate.grids.values()])


def _on_shared_ranks(candidate: Candidate, batch: Batch, strategy: str) -> Simulated:
    """Plan and simulate a batch on pipelines whose GPUs encoders share. Raises ValueError if no plan can be run."""
    best: Simulated | None = None
    refusal = None
    for name in QUICK_STRATEGIES if strategy == AUTO else (strategy,):
        chosen, slots = run_strategy(name, batch)
        try:
            step = simulate_shared(batch, slots, sharing_of(candidate))
        except ValueError as err:  # the plan defers more than the schedule can wait for
            refusal = err
            continue
        if best is None or step.step_s < best.step_s:
            best = Simulated(batch=batch, slots=slots, strategy=chosen, step_s=step.step_s, peaks=step.peaks)
    if best is None:
        raise refusal or ValueError(f"strategy {strategy!r} plans nothing")
    return best


def _colocated_s(demand: Demand, batch: Batch, slots: Slots, gathering: tuple[float, float]) -> float:
    """Return the seconds of a step of colocated ranks, which meet at every microbatch and send while they compute.

    gathering: seconds that they send for every microbatch, in its forward and in its backward.
    """
    filled, layers = batch.occupied(slots).any(axis=0), sum(unit.layers for unit in demand.units)
    loads = batch.loads(slots)
    forward = loads.sum(axis=2).max(axis=0)
    backward = (loads * (batch.step_factors - 1)).sum(axis=2).max(axis=0)
    forward = forward + sum(unit.microbatch_s[0] for unit in demand.units)
    backward = backward + sum(unit.microbatch_s[1] for unit in demand.units)
    of_microbatch = forward + backward + exposed_s(gathering[0], forward, layers) + exposed_s(gathering[1], backward, layers)
    return float(of_microbatch[filled].sum())


def _parts(demand: Demand, candidate: Candidate, batches: Ints, steps: Sequence[Simulated], seconds: Floats) -> dict[str, float]:
    """Return the GPU-seconds of a mean step by what they are spent on."""
    taken = steps[:_TAKEN_APART]
    model, work = 0.0, 0.0
    for unit in demand.units:
        tp, least = candidate.grids[unit.name].tp, min(unit.forward_s)
        rows = batches[: len(taken)]
        fixed_s = len(taken) * candidate.microbatches * candidate.grids[unit.name].dp * sum(unit.microbatch_s)
        model += least * ((1 + unit.backward_factor) * float(unit.forward_s[least][rows].sum()) + fixed_s)
        work += tp * ((1 + unit.backward_factor) * float(unit.forward_s[tp][rows].sum()) + fixed_s)
    parts = dict.fromkeys(PARTS, 0.0)
    for step in taken:
        ideal_s, sent_s = _without_links(demand, candidate, step)
        parts[EXCHANGE] += candidate.gpus * max(0.0, step.step_s - sent_s)
        parts[TRANSFERS] += candidate.gpus * max(0.0, sent_s - ideal_s)
        parts[WAITING] += candidate.gpus * ideal_s
    parts[MODEL], parts[SLICES] = model, max(0.0, work - model)
    parts[WAITING] = max(0.0, parts[WAITING] - parts[MODEL] - parts[SLICES])
    parts[UPDATE] = candidate.gpus * len(taken) * update_s(demand, candidate)
    alone_s = sum(step.step_s for step in taken) + len(taken) * update_s(demand, candidate)
    parts[SERVICES] = candidate.gpus * (float(seconds[: len(taken)].sum()) - alone_s)
    scale = float(seconds.mean()) / float(seconds[: len(taken)].sum())
    parts = {name: amount * scale for name, amount in parts.items()}
    parts[IDLE] = (demand.cluster.num_gpus - candidate.gpus) * float(seconds.mean())
    return parts


def _without_links(demand: Demand, candidate: Candidate, step: Simulated) -> tuple[float, float]:
    """Return the seconds of the same plan without exchange and transfers, and with transfers only."""
    if candidate.placement == "colocated":
        alone_s = _colocated_s(demand, step.batch, step.slots, (0.0, 0.0))
        return alone_s, alone_s
    sending = replace(step.batch.execution, exchange_s={})
    ideal_s, sent_s = (
        _pipelines_s(candidate, replace(step.batch, execution=execution), step.slots)
        for execution in (replace(sending, latency_s=0.0, bytes_per_s=math.inf), sending)
    )
    return ideal_s, sent_s


def _pipelines_s(candidate: Candidate, batch: Batch, slots: Slots) -> float:
    if candidate.sharing is not None:
        return simulate_shared(batch, slots, sharing_of(candidate)).step_s
    return simulate(planned_work(batch, slots)).iteration_s


def _ranks(demand: Demand, candidate: Candidate, peaks: Floats) -> tuple[RankMemory, ...]:
    if candidate.placement == "colocated":
        shared = [sharded_state(unit, candidate.grids[LLM].dp) for unit in demand.units]
        return (
            RankMemory(
                unit="all units",
                stage=0,
                weights=sum(state.weights for state in shared),
                gradients=sum(state.gradients for state in shared),
                optimizer=sum(state.optimizer for state in shared),
                activations=float(peaks[0]),
            ),
        )
    states = memory_bytes(demand, candidate)
    stages = [(unit, stage) for unit, grid in candidate.grids.items() for stage in range(grid.pp)]
    on_gpu = {unit: [states[unit]] for unit in candidate.grids}
    on_gpu[LLM] += [states[guest] for guest in candidate.guests]
    return tuple(
        RankMemory(
            unit=unit,
            stage=stage,
            weights=sum(state.weights for state in on_gpu[unit]),
            gradients=sum(state.gradients for state in on_gpu[unit]),
            optimizer=sum(state.optimizer for state in on_gpu[unit]),
            activations=float(peak),
        )
        for (unit, stage), peak in zip(stages, peaks, strict=True)
        if unit not in candidate.guests
    )
