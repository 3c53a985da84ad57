"""What a candidate with pipelines takes by a formula, by which searches compare: seconds of a step, and memory of every unit's
fullest GPU.

The step is that of DistTrain (section 5.1, eq. 1 and 2) and Entrain (dissertation, eq. 4.2): a microbatch passes all stages once,
and for each further one the slowest stage passes. Samples count with their mean, so what differs between microbatches is not in
it: that is for the simulator. A stage has whole layers, so 28 layers on 8 stages are as slow as on 7, and the last one has the
head.

The papers' formula adds what replicas exchange in a step, none of it hidden by computing. That is kept for their searches. What
is hidden in truth (`links`), and what the judge has too, is Headrace's own estimate (`overlapped`).

Corrected here: in DistTrain's memory an LLM's GPU keeps L / TP of activations however many stages there are. That is true of a
pipeline of the LLM alone. A stage with s stages behind it, in whatever units, keeps min(K, s + 1) microbatches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headrace.plan import GENERATOR, LLM
from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.orchestration.candidate import Candidate, UnitGrid
from headrace.reorder_service.planning.orchestration.cluster import Cluster
from headrace.reorder_service.planning.orchestration.demand import Demand, UnitDemand
from headrace.reorder_service.planning.orchestration.links import collective_s, exposed_s
from headrace.reorder_service.planning.orchestration.stage_cuts import layer_share, time_share, weight_share
from headrace.schedule import EAGER, GPIPE, ZERO_BUBBLE

USABLE_SHARE = 0.92
"""Share of a GPU's memory that a candidate may take; the trainer keeps to the same."""
_TRAINED_BYTES = 4 + 4 + 2
"""Of a trained weight, in every replica: itself and its gradient in float32, and its copy in bfloat16 during a step."""
_MOMENT_BYTES = 8
"""Of a trained weight, in all replicas together (ZeRO-1): the two moments of Adam."""
_FROZEN_BYTES = 2
"""Of a frozen weight: itself in bfloat16."""
_GRADIENT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitMemory:
    """Bytes of the fullest GPU of a unit, which is one of its first stage."""

    weights: float
    """With the copies in bfloat16 that matrix products take."""
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations


def hop_s(unit: UnitDemand, cluster: Cluster, samples: Floats | float) -> Floats:
    """Return the seconds in which so many samples pass from a stage to the next, and their gradients back where there are any."""
    bandwidth = cluster.intra_node_bytes_per_s if cluster.nodes == 1 else cluster.inter_node_bytes_per_s
    ways = 2.0 if unit.backward_factor > 0 else 1.0
    seconds: Floats = ways * (cluster.latency_s + np.asarray(samples) * float(unit.sent_bytes.mean()) / bandwidth)
    return seconds


def exchange_s(unit: UnitDemand, cluster: Cluster, dp: Ints | int, tp: Ints | int, pp: Ints | int) -> Floats:
    """Return the seconds in which the replicas of a unit gather its trained weights; to sum their gradients takes as long
    (ZeRO-1).

    Both are float32, as in the trainer. A replica's ranks are consecutive, so that replicas share a node where it has room for
    several.
    """
    dp, tp, pp = np.asarray(dp), np.asarray(tp), np.asarray(pp)
    trained = unit.parameters * unit.trained_share * weight_share(unit, pp) / tp
    return collective_s(_GRADIENT_BYTES * trained, dp, cluster.gpus_per_node // (tp * pp), cluster)


def exposed_exchange_s(
    unit: UnitDemand, cluster: Cluster, dp: Ints | int, tp: Ints | int, pp: Ints | int, forward_s: Floats | float
) -> tuple[Floats, Floats]:
    """Return the seconds of both exchanges that computing does not hide: in front of a stage's first forward, and behind its last
    backward.

    forward_s: of one microbatch on a stage. Each layer is a part of the exchange (`links.exposed_s`).
    """
    return exposed_of(unit, exchange_s(unit, cluster, dp, tp, pp), pp, forward_s)


def exposed_of(unit: UnitDemand, one_s: Floats, pp: Ints | int, forward_s: Floats | float) -> tuple[Floats, Floats]:
    """Return the same of exchanges that take so many seconds each (`exchange_s`)."""
    layers = np.rint(layer_share(unit, pp) * unit.layers)
    return exposed_s(one_s, forward_s, layers), exposed_s(one_s, np.asarray(forward_s) * unit.backward_factor, layers)


def state_bytes(unit: UnitDemand, dp: Ints | int, tp: Ints | int, pp: Ints | int) -> Floats:
    """Return the bytes of weights, gradients and optimizer on the fullest GPU of a unit."""
    weights, gradients, optimizer = _states(unit, dp, tp, pp)
    return weights + gradients + optimizer


def _states(unit: UnitDemand, dp: Ints | int, tp: Ints | int, pp: Ints | int) -> tuple[Floats, Floats, Floats]:
    on_gpu = unit.parameters * weight_share(unit, pp) / np.asarray(tp)
    trained = on_gpu * unit.trained_share
    weights = trained * (_TRAINED_BYTES - _GRADIENT_BYTES) + (on_gpu - trained) * _FROZEN_BYTES
    return weights, trained * _GRADIENT_BYTES, trained * _MOMENT_BYTES / np.asarray(dp)


def kept_bytes_of_sample(unit: UnitDemand, tp: int) -> float:
    """Return the bytes that all stages of a unit keep of one sample on one slice; none without a backward."""
    return float(unit.kept_bytes[tp].mean()) if unit.backward_factor > 0 else 0.0


def stages_behind(candidate: Candidate, unit: str) -> int:
    """Return the number of stages that a microbatch passes after the first one of a unit, in all units."""
    grids = candidate.grids
    return grids[unit].pp - 1 + sum(grids[other].pp for other in _after(unit) if other in grids)


def _after(unit: str) -> tuple[str, ...]:
    """Return the units that a sample may pass after a unit."""
    return {LLM: (GENERATOR,), GENERATOR: ()}.get(unit, (LLM, GENERATOR))


def in_flight(demand: Demand, microbatches: int, behind: Ints | int, pp: Ints | int, deepest: Ints | int) -> Floats:
    """Return the microbatches that a unit's first stage keeps at most.

    behind: stages behind it in all units; pp: stages of its unit; deepest: the most stages that any stage has behind it.
    Under zero-bubble every stage may keep as many as the first one does, under gpipe all, under eager all but on the last stage.
    What interleaved schedules of this repository keep has no closed form; this is a bound that holds for up to 8 stages.
    """
    behind, pp, deepest = np.asarray(behind), np.asarray(pp), np.asarray(deepest)
    holds_all = (demand.schedule == GPIPE) | ((demand.schedule == EAGER) & (behind > 0))
    most = np.asarray((deepest if demand.schedule == ZERO_BUBBLE else behind) + 1, np.float64)
    if demand.chunks > 1:
        after = behind - (pp - 1)
        most = most + 2 * after + 2 * (pp - 1) / demand.chunks + np.where(after > 0, deepest, 1)
    held: Floats = np.where(holds_all, float(microbatches), np.minimum(float(microbatches), most))
    return held


def microbatch_samples(demand: Demand, candidate: Candidate, unit: str) -> float:
    """Return the samples of a microbatch on one replica of a unit: the mean, where its replicas do not divide the LLM's."""
    return demand.global_batch / candidate.microbatches / candidate.grids[unit].dp


def microbatch_s(demand: Demand, candidate: Candidate) -> dict[str, float]:
    """Return by unit the seconds of a microbatch's forward and backward in all its stages."""
    return {
        unit.name: microbatch_samples(demand, candidate, unit.name) * demand.step_s(unit, candidate.grids[unit.name].tp)
        for unit in demand.units
    }


def unit_update_s(unit: UnitDemand, dp: Ints | int, tp: Ints | int, pp: Ints | int) -> Floats:
    """Return the seconds in which a unit's fullest GPU collects gradients behind the last action, clips and applies them.

    Replicas share the update (ZeRO-1).
    """
    collect_s, apply_s = unit.step_s
    seconds: Floats = unit.trained_share * weight_share(unit, pp) / np.asarray(tp) * (collect_s + apply_s / np.asarray(dp))
    return seconds


def update_s(demand: Demand, candidate: Candidate) -> float:
    """Return the seconds of the slowest GPU behind the last action of a step.

    Units on the same GPUs, and all units of colocated ranks, take their turns.
    """
    of_units = {unit.name: float(unit_update_s(unit, *_sizes(candidate.grids[unit.name]))) for unit in demand.units}
    if candidate.placement == "colocated":
        return sum(of_units.values())
    of_units[LLM] += sum(of_units[unit] for unit in candidate.guests)
    return max(of_units.values())


def step_s(demand: Demand, candidate: Candidate, *, overlapped: bool = False) -> float:
    """Return the seconds of a step (eq. 4.2): a microbatch through all stages, K - 1 times the slowest, the exchange.

    Encoders run side by side, so the longest counts. Interleaved schedules fill the pipeline in a part of the time, as many as
    there are chunks. overlapped: count of the exchange what computing does not hide, and what microbatches and steps take besides
    their samples. The papers count all of the former and none of the latter.
    """
    grids, count = candidate.grids, candidate.microbatches
    whole = microbatch_s(demand, candidate)
    if overlapped:
        whole = {unit.name: whole[unit.name] + sum(unit.microbatch_s) for unit in demand.units}
    slowest = {unit.name: whole[unit.name] * float(time_share(unit, grids[unit.name].pp)) for unit in demand.units}
    exchange = []
    for unit in demand.units:
        is_last = unit.name == demand.unit_names[-1]
        samples = microbatch_samples(demand, candidate, unit.name)
        whole[unit.name] += (grids[unit.name].pp - is_last) * float(hop_s(unit, demand.cluster, samples))
        forward_s = slowest[unit.name] / (1 + unit.backward_factor)
        shape = _sizes(grids[unit.name])
        exposed = exposed_exchange_s(unit, demand.cluster, *shape, forward_s) if overlapped else (
            2.0 * exchange_s(unit, demand.cluster, *shape),
        )  # fmt: skip
        exchange.append(float(sum(exposed)))
    encoders = [whole[name] for name in grids if name not in (LLM, GENERATOR)]
    filling = max(encoders, default=0.0) + whole[LLM] + whole.get(GENERATOR, 0.0)
    behind_s = update_s(demand, candidate) if overlapped else 0.0
    return filling / demand.chunks + (count - 1) * max(slowest.values()) + max(exchange) + behind_s


def memory_bytes(demand: Demand, candidate: Candidate) -> dict[str, UnitMemory]:
    """Return by unit what the fullest of its GPUs holds."""
    grids, count = candidate.grids, candidate.microbatches
    behind = {name: stages_behind(candidate, name) for name in grids}
    deepest = max(behind.values())
    found = {}
    for unit in demand.units:
        grid = grids[unit.name]
        held = float(in_flight(demand, count, behind[unit.name], grid.pp, deepest))
        if unit.name in candidate.guests and candidate.sharing == "colocated":
            held = float(count)
        elif candidate.in_flight is not None:
            held = float(min(count, candidate.in_flight))
        kept = kept_bytes_of_sample(unit, grid.tp) * float(layer_share(unit, grid.pp))
        weights, gradients, optimizer = map(float, _states(unit, *_sizes(grid)))
        found[unit.name] = UnitMemory(
            weights=weights,
            gradients=gradients,
            optimizer=optimizer,
            activations=held * microbatch_samples(demand, candidate, unit.name) * kept,
        )
    return found


def fullest_bytes(demand: Demand, candidate: Candidate) -> float:
    """Return the bytes of the fullest GPU of a candidate, on which units that share GPUs hold as much as each at most."""
    memory = {unit: of.total for unit, of in memory_bytes(demand, candidate).items()}
    memory[LLM] += sum(memory[unit] for unit in candidate.guests)
    return max(memory.values())


def fullest_of_layouts(
    demand: Demand, microbatches: int, dp: Mapping[str, Ints], tp: Mapping[str, Ints], pp: Mapping[str, Ints]
) -> Floats:
    """Return (m,) what `fullest_bytes` does of candidates whose units have GPUs of their own. dp, tp, pp: (m,) by unit."""
    behind = {name: pp[name] - 1 + sum(pp[other] for other in _after(name) if other in pp) for name in pp}
    deepest, fullest = np.max(list(behind.values()), axis=0), np.zeros(dp[LLM].size)
    for unit in demand.units:
        name = unit.name
        kept = np.zeros(fullest.size)
        for width in unit.forward_s:
            kept[tp[name] == width] = kept_bytes_of_sample(unit, width)
        held = in_flight(demand, microbatches, behind[name], pp[name], deepest)
        samples = demand.global_batch / microbatches / dp[name]
        activations = held * samples * kept * layer_share(unit, pp[name])
        fullest = np.maximum(fullest, state_bytes(unit, dp[name], tp[name], pp[name]) + activations)
    return fullest


def usable_bytes(cluster: Cluster) -> float:
    """Return the bytes of a GPU that a candidate may take."""
    return USABLE_SHARE * cluster.memory_bytes


def fits(demand: Demand, candidate: Candidate) -> bool:
    """Return whether a candidate fits the memory of the cluster's GPUs."""
    return fullest_bytes(demand, candidate) <= usable_bytes(demand.cluster)


def _sizes(grid: UnitGrid) -> tuple[int, int, int]:
    return grid.dp, grid.tp, grid.pp
