"""The least that encoders' kernels in the bubbles of an LLM's pipelines could take (Optimus, section 4), beside nested actions.

Optimus cuts encoders into kernels and places each where the LLM's GPUs would wait (`planning.bubbles`). However small the pieces,
the step takes what the LLM takes by itself, even if encoders hide all that replicas exchange, and what all work takes if no GPU
ever waits. Nested actions, which the trainer has, are pieces of a stage of a microbatch; what they take more than this is what
finer pieces could gain at most.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headrace.reorder_service.planning.batch import Batch, Ints, Slots
from headrace.reorder_service.planning.orchestration.demand import Demand
from headrace.reorder_service.planning.orchestration.judge import Simulated, sharing_of, simulated
from headrace.reorder_service.planning.orchestration.judgement import Judgement
from headrace.reorder_service.planning.sharing import Sharing
from headrace.reorder_service.planning.simulation.eager_depth import planned_work
from headrace.reorder_service.planning.simulation.shared_ranks import least_shared_s
from headrace.reorder_service.planning.simulation.simulator import simulate

_BATCHES = 2


def bubble_bound_s(demand: Demand, nested: Judgement, batches: Ints, seed: int = 0) -> float:
    """Return the mean seconds of a step that no placement of kernels beats on the GPUs of a nested candidate, under its plans.

    Of few of the batches that it was judged by, which are scaled to all of them.
    """
    sharing, least_s, taken_s = sharing_of(nested.candidate), 0.0, 0.0
    for rows in batches[:_BATCHES]:
        step = simulated(demand, nested.candidate, rows, nested.strategy, seed)
        least_s += max(simulate(planned_work(*_without_guests(step, sharing))).iteration_s, least_shared_s(step.batch, sharing))
        taken_s += step.step_s
    return nested.step_s * least_s / taken_s


def _without_guests(step: Simulated, sharing: Sharing) -> tuple[Batch, Slots]:
    """Return a step's plan with those units only that do not share the LLM's GPUs, and the LLM, and with no exchange."""
    batch = step.batch
    own = np.array([unit not in sharing.guests for unit in batch.units])
    replicas = {unit: count for unit, count in batch.execution.unit_replicas.items() if unit not in sharing.guests}
    stages = {unit: count for unit, count in batch.topology.stages.items() if unit not in sharing.guests}
    alone = replace(
        batch,
        costs=np.ascontiguousarray(batch.costs[own]),
        memory=np.ascontiguousarray(batch.memory[own]),
        transfer_bytes=np.ascontiguousarray(batch.transfer_bytes[own]),
        topology=replace(batch.topology, stages=stages),
        execution=replace(batch.execution, exchange_s={}, unit_replicas=replicas),
    )
    return alone, step.slots[own]
