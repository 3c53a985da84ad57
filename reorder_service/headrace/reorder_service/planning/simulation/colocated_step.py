"""The time of a step on colocated ranks, which have all units each: it follows from the plan without replaying a schedule.

A rank takes the sum of what its samples take in all units. Where ranks meet at every microbatch (the collectives of FSDP), a
step takes the sum over the microbatches of the slowest rank's seconds; where they meet once a step (DDP with accumulated
gradients), the slowest rank's sum. Where they meet behind every unit, see `phase_step`.
"""

from __future__ import annotations

from headrace.plan import Predicted
from headrace.reorder_service.planning.batch import Batch, Floats, Slots


def sample_seconds(batch: Batch) -> Floats:
    """Return the (n,) forward and backward seconds of each sample in all units together."""
    seconds: Floats = (batch.costs * batch.step_factors[:, None]).sum(axis=0)
    return seconds


def least_seconds(batch: Batch, seconds: Floats) -> float:
    """Return what no plan can beat: the even share of each rank, or the largest sample if that takes longer.

    seconds: (n,) of `sample_seconds`.
    """
    return max(float(seconds.sum()) / batch.topology.replicas, float(seconds.max()))


def step_seconds(batch: Batch, loads: Floats) -> float:
    """Return the seconds of a step, given the (D, K) seconds of every microbatch of every rank."""
    if batch.execution.colocated == "microbatch":
        return float(loads.max(axis=0).sum())
    return float(loads.sum(axis=1).max())


def predict(batch: Batch, slots: Slots) -> Predicted:
    """Return the time of a step of a plan on colocated ranks; `bubble` is the share of it that they wait for each other."""
    loads = (batch.loads(slots) * batch.step_factors).sum(axis=2)
    iteration = step_seconds(batch, loads)
    capacity = batch.topology.replicas * iteration
    bubble = max(0.0, 1.0 - float(loads.sum()) / capacity) if capacity > 0 else 0.0
    bound = min(least_seconds(batch, sample_seconds(batch)), iteration)  # their sums are rounded in different orders
    return Predicted(iteration_s=iteration, bubble=bubble, lower_bound_s=bound)
