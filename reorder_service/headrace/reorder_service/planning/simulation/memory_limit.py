"""The memory limit of an execution: by how much a plan exceeds it, and what is said where no plan keeps it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from headrace.reorder_service.planning.batch import Batch, Floats, Ints, Slots
from headrace.reorder_service.planning.simulation.eager_depth import planned_work
from headrace.reorder_service.planning.simulation.simulator import peak_memory

_GIB = 2.0**30


def excess_memory(batch: Batch, slots: Slots) -> float:
    """Return by how much the plan's fullest stage exceeds the memory limit, in the unit of `Batch.memory`; 0 if it fits."""
    limit = batch.execution.memory_limit
    return 0.0 if math.isinf(limit) else max(0.0, float(_peaks(batch, slots).max()) - limit)


def held_by_stage(batch: Batch) -> Floats:
    """Return (U, n) the activations of a sample that each stage of a unit keeps from its forward to its backward.

    An action on one of several chunks keeps its share of them. A unit without a backward keeps nothing.
    """
    stages = np.array(list(batch.topology.stages.values()))
    keeps = np.array([batch.execution.backward_factor(unit) > 0 for unit in batch.units])
    held: Floats = batch.memory * (keeps / stages)[:, None]
    return held


def kinds_that_free(batch: Batch) -> Ints:
    """Return (U,) the kind of action after which each unit frees the activations of a microbatch, as `Kind` values."""
    return np.array([batch.execution.freed_by(unit) for unit in batch.units], np.int64)


def check_memory(batch: Batch, slots: Slots, name: Callable[[int], str], first_replica: int = 0) -> None:
    """Raise ValueError if the plan of a batch, whose memory is in bytes, exceeds the memory limit of the batch's execution.

    slots: (U, n) of the plan. The message says by how much, and names the sample that does not fit even by itself, or else the
    fullest microbatch. name: returns the name of a sample with some id. first_replica: what the first replica is called.
    """
    limit = batch.execution.memory_limit
    if math.isinf(limit):
        return
    excess = excess_memory(batch, slots)
    if excess == 0:
        return
    remedy = "give the pipelines more stages or checkpointing, or raise execution.memory_gib"
    of_stage = held_by_stage(batch)
    unit, row = np.unravel_index(int(of_stage.argmax()), of_stage.shape)
    if (alone := float(of_stage[unit, row])) > limit:
        raise ValueError(
            f"the activations of sample {name(int(batch.sample_ids[row]))} alone take {alone / _GIB:.3g} GiB on every stage of "
            f"{batch.units[unit]!r}, {(alone - limit) / _GIB:.3g} GiB more than the limit of {limit / _GIB:.3g} GiB; "
            f"{remedy}, or leave such samples out"
        )
    peaks = _peaks(batch, slots)
    replica, stage = np.unravel_index(int(peaks.argmax()), peaks.shape)
    unit_of_stage = np.repeat(np.arange(len(batch.units)), list(batch.topology.stages.values()))
    loads = np.bincount(slots[unit_of_stage[stage]], weights=of_stage[unit_of_stage[stage]], minlength=batch.num_slots)
    microbatch = int(loads.reshape(peaks.shape[0], -1)[replica].argmax())
    raise ValueError(
        f"no plan was found whose activations keep within {limit / _GIB:.3g} GiB: in the leanest one, stage {stage} "
        f"({batch.units[unit_of_stage[stage]]!r}) of replica {first_replica + replica} exceeds that by {excess / _GIB:.3g} GiB, "
        f"most of all with microbatch {microbatch}; {remedy}, or give a replica more microbatches"
    )


def _peaks(batch: Batch, slots: Slots) -> Floats:
    """Return (D, S) the most that each stage holds in a plan."""
    return peak_memory(planned_work(batch, slots, has_links=False))
