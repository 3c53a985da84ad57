"""The time of a step on ranks that have all units and meet after every phase, as FSDP's collectives make them (OrchMLLM).

A phase is one unit of one microbatch. A step takes the sum over the phases of what the slowest rank takes for its samples, with
what the unit's form pads them to. What ranks send each other between the phases takes no time.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from headrace.plan import LLM, Predicted
from headrace.reorder_service.planning.batch import Batch, Floats, Slots
from headrace.reorder_service.planning.form_loads import form_seconds, weights_alone
from headrace.reorder_service.planning.sequence_degrees import in_parts, most_degrees, sequence_seconds

AFTER_PHASES: Final = "phases"
"""What `Execution.colocated` is for such ranks."""


def phase_loads(batch: Batch, slots: Slots) -> Floats:
    """Return the (D, K, U) forward and backward seconds of every microbatch of every rank in every unit, padding included.

    Each of the ranks that share a sequence of the LLM has an equal part of it.
    """
    options, count = batch.execution.post_balancing, batch.topology.microbatches
    loads = []
    for unit, costs, slot, factor in zip(batch.units, batch.costs, slots, batch.step_factors, strict=True):
        if unit == LLM and batch.degrees is not None:
            parts, of_parts = in_parts(sequence_seconds(batch), slot, batch.degrees, count)
            loads.append(np.bincount(of_parts, weights=parts, minlength=batch.num_slots) * factor)
        else:
            loads.append(form_seconds(options, unit, costs, slot, batch.num_slots) * factor)
    return np.stack(loads, axis=-1).reshape(batch.topology.replicas, batch.topology.microbatches, len(loads))


def least_phase_seconds(batch: Batch) -> float:
    """Return what no plan can beat: the sum over the units of a rank's even share, or of the largest sample if that is more.

    A sequence of the LLM that ranks may share takes no less than on as many of them as may.
    """
    options = batch.execution.post_balancing
    total = 0.0
    for unit, costs, factor in zip(batch.units, batch.costs, batch.step_factors, strict=True):
        alone = weights_alone(options.forms.get(unit, "no_padding"), costs, options.quadratic)
        largest = (alone / most_degrees(batch) if unit == LLM else alone).max()
        total += float(factor) * max(float(alone.sum()) / batch.topology.replicas, float(largest))
    return total


def predict_phases(batch: Batch, slots: Slots) -> Predicted:
    """Return the time of a step of a plan; `bubble` is the share of it in which ranks wait for each other or compute padding."""
    iteration = float(phase_loads(batch, slots).max(axis=0).sum())
    capacity = batch.topology.replicas * iteration
    work = float((batch.costs.sum(axis=1) * batch.step_factors).sum())
    bubble = min(1.0, max(0.0, 1.0 - work / capacity)) if capacity > 0 else 0.0
    bound = min(least_phase_seconds(batch), iteration)  # their sums are rounded in different orders
    return Predicted(iteration_s=iteration, bubble=bubble, lower_bound_s=bound)
