"""What other systems would make of a batch on as many GPUs: the baselines that readers of the papers expect, simulated.

| baseline         | pipelines                                                                   | samples                       |
|------------------|-----------------------------------------------------------------------------|-------------------------------|
| llm-only         | those of the batch                                                          | by strategy `llm-only`        |
| megatron         | every other unit is one stage of the LLM's pipeline (DistTrain, 8.1)        | in arrival order              |
| megatron-balanced | encoder and LLM in a row, cut into equal virtual stages (Optimus, app. B)  | in arrival order              |
| ratio            | stages in proportion to the units' work (DistTrain, 8.2.1)                  | in arrival order              |
| dip              | every stage has a part of the encoders and of the LLM, encoders first       | in arrival order              |
| encoders-replicated | every stage of the LLM computes all encoders (Cornstarch, arXiv, 2.2)    | in arrival order              |
| fsdp             | none: every rank has all units                                              | in arrival order              |
| fsdp-orchmllm    | none: every rank has all units                                              | by strategy `orchmllm`        |

All have the batch's replicas, and as many stages as these leave of its GPUs; fsdp and fsdp-orchmllm have a rank for each GPU. The
ranks of fsdp meet at every microbatch, as if they went on to the next unit whenever they are ready; those of fsdp-orchmllm meet
after every unit of it, which is where its samples change their ranks. Schedules are the
batch's for llm-only, megatron and ratio; the others' pipelines have links that take no time, nothing is exchanged, and fsdp
gathers weights while it computes. Of DIP (Xue et al. 2026) only what Entrain tells of it is here: its sub-microbatches, for which
neither number nor rule is given, are not. Layers are as fine as wanted where megatron-balanced cuts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from headrace.plan import GENERATOR, LLM, Predicted
from headrace.reorder_service.planning.batch import Batch, Floats, Slots
from headrace.reorder_service.planning.cost_model.stable_batch import divide_stages
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.search.unit_dealing import dealt
from headrace.reorder_service.planning.simulation.chained_step import (
    chained_step_s,
    encoders_first_actions,
    interleaved_actions,
)
from headrace.reorder_service.planning.simulation.colocated_step import predict
from headrace.reorder_service.planning.simulation.eager_depth import planned_work
from headrace.reorder_service.planning.simulation.phase_step import AFTER_PHASES, predict_phases
from headrace.reorder_service.planning.simulation.simulator import simulate
from headrace.reorder_service.planning.strategies import arrival, llm_only, phases

FEWEST_CHUNKS = 2
"""Of a stage under megatron-balanced, whose pipelines are interleaved."""


def llm_only_step(batch: Batch) -> Predicted:
    """Simulate the batch's pipelines under strategy `llm-only`."""
    return _simulated(batch, dealt(llm_only.plan_slots)(batch))


def megatron_step(batch: Batch) -> Predicted:
    """Simulate pipelines in which every unit but the LLM is one stage. Raises ValueError if there are too few stages for that."""
    num_stages, others = _num_stages(batch), len(batch.units) - 1
    if num_stages <= others:
        raise ValueError(f"{num_stages} stages are too few for one of each unit ({', '.join(batch.units)})")
    even = _even(batch, {unit: num_stages - others if unit == LLM else 1 for unit in batch.units})
    return _simulated(even, arrival.plan_slots(even))


def ratio_step(batch: Batch) -> Predicted:
    """Simulate pipelines whose stages are divided in proportion to the units' work. Raises ValueError for fewer than units."""
    work = batch.costs.sum(axis=1) * batch.step_factors
    even = _even(batch, dict(zip(batch.units, divide_stages(work, _num_stages(batch)), strict=True)))
    return _simulated(even, arrival.plan_slots(even))


def megatron_balanced_step(batch: Batch) -> Predicted:
    """Simulate interleaved pipelines whose virtual stages all take the same in the mean.

    Raises ValueError for several encoders, which are no row of layers (Optimus, appendix B).
    """
    if len(batch.topology.encoders) > 1:
        raise ValueError(f"{', '.join(batch.topology.encoders)} do not depend on each other, so they are no row of layers to cut")
    num_stages, chunks = _num_stages(batch), max(FEWEST_CHUNKS, batch.execution.chunks)
    work = batch.costs.sum(axis=1) * batch.step_factors
    ends = np.concatenate([[0.0], np.cumsum(work)])
    cuts = np.linspace(0.0, ends[-1], num_stages * chunks + 1)
    overlap = np.minimum(cuts[1:, None], ends[1:]) - np.maximum(cuts[:-1, None], ends[:-1])
    shares = np.maximum(overlap, 0.0) / np.where(work > 0, work, 1.0)  # (S * V, U)
    by_stage = shares.reshape(chunks, num_stages, -1).transpose(1, 0, 2)
    actions = interleaved_actions(num_stages, batch.topology.microbatches, chunks)
    return _chained(batch, by_stage, actions)


def dip_step(batch: Batch) -> Predicted:
    """Simulate DIP's pipelines and order. Raises ValueError for a generator, of which nothing is told."""
    if GENERATOR in batch.units:
        raise ValueError("nothing is published of where dip has a generator")
    num_stages = _num_stages(batch)
    of_llm = np.array([unit == LLM for unit in batch.units], np.float64)
    by_stage = np.broadcast_to(np.stack([1.0 - of_llm, of_llm]) / num_stages, (num_stages, 2, of_llm.size))
    return _chained(batch, by_stage, encoders_first_actions(num_stages, batch.topology.microbatches))


def encoders_replicated_step(batch: Batch) -> Predicted:
    """Simulate pipelines of the LLM whose every stage computes all encoders for each microbatch, in front of its own layers.

    Work that is done again counts as work: GPUs are not idle meanwhile. Raises ValueError for a generator, of which nothing is
    told.
    """
    if GENERATOR in batch.units:
        raise ValueError("nothing is published of where encoders-replicated has a generator")
    num_stages = _num_stages(batch)
    of_stage = np.array([1.0 / num_stages if unit == LLM else 1.0 for unit in batch.units])
    by_stage = np.broadcast_to(of_stage, (num_stages, 1, of_stage.size))
    return _chained(batch, by_stage, interleaved_actions(num_stages, batch.topology.microbatches, 1))


def fsdp_step(batch: Batch) -> Predicted:
    """Predict the step of ranks that have all units each, in microbatches of about as many samples as the batch's."""
    colocated = _colocated(batch, Execution(colocated="microbatch"))
    return predict(colocated, arrival.plan_slots(colocated))


def fsdp_orchmllm_step(batch: Batch) -> Predicted:
    """Predict the step of the same ranks whose units are each balanced by themselves, on nodes that are not known."""
    options = replace(batch.execution.post_balancing, ranks_per_node=0)
    colocated = _colocated(batch, Execution(colocated=AFTER_PHASES, post_balancing=options))
    return predict_phases(colocated, phases.plan_slots(colocated))


BASELINES: Mapping[str, Callable[[Batch], Predicted]] = {
    "llm-only": llm_only_step,
    "megatron": megatron_step,
    "megatron-balanced": megatron_balanced_step,
    "ratio": ratio_step,
    "dip": dip_step,
    "encoders-replicated": encoders_replicated_step,
    "fsdp": fsdp_step,
    "fsdp-orchmllm": fsdp_orchmllm_step,
}
"""By name. Each returns the step of a batch on as many GPUs, or raises ValueError in a sentence that says why it has none."""


def _num_gpus(batch: Batch) -> int:
    """Return the number of stages of all replicas of all units."""
    return sum(replicas * stages for replicas, stages in zip(batch.unit_replicas, batch.topology.stages.values(), strict=True))


def _num_stages(batch: Batch) -> int:
    """Return the stages of each of the LLM's replicas, if all units had as many replicas."""
    return _num_gpus(batch) // batch.topology.replicas


def _colocated(batch: Batch, execution: Execution) -> Batch:
    """Return the batch for a rank on each GPU that has all units. execution: but for the backward's shares, which are kept."""
    ranks = _num_gpus(batch)
    count = max(1, round(batch.topology.replicas * batch.topology.microbatches / ranks))
    topology = replace(batch.topology, replicas=ranks, microbatches=count)
    return replace(batch, topology=topology, execution=replace(execution, backward_factors=batch.execution.backward_factors))


def _even(batch: Batch, stages: dict[str, int]) -> Batch:
    """Return the batch for other stages, of as many replicas in all units."""
    execution = replace(batch.execution, unit_replicas={}, stage_loads={}, memory_limit=math.inf)
    return replace(batch, topology=replace(batch.topology, stages=stages), execution=execution)


def _simulated(batch: Batch, slots: Slots) -> Predicted:
    return simulate(planned_work(batch, slots))


def _chained(batch: Batch, shares: Floats, actions: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Predicted:
    """Simulate samples in arrival order on stages whose chunks have (S, V, U) shares of each unit."""
    even = _even(batch, dict.fromkeys(batch.units, 1))
    loads = even.loads(arrival.plan_slots(even))
    factors = np.array([[1.0, batch.execution.backward_factor(unit)] for unit in batch.units])
    seconds = np.einsum("dku,svu,uw->wdksv", loads, shares, factors)
    step = chained_step_s(seconds, actions)
    capacity = step * batch.topology.replicas * shares.shape[0]
    busy = float(seconds.sum())
    bubble = max(0.0, 1.0 - busy / capacity) if capacity > 0 else 0.0
    return Predicted(iteration_s=step, bubble=bubble, lower_bound_s=step * (1.0 - bubble))
