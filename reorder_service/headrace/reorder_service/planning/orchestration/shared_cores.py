"""How much longer a step takes where a job's services run on the processor cores of its trainers.

While few trainers compute, services run on the cores that are left. While many do, all share the cores, and what services take,
trainers lack. We take it that services take as much of the cores at any time of a step, as they work ahead of the trainers, and
that trainers that compute at the same time become equally slow, so that actions keep their order. Cores of several nodes count as
one pool. What services take of caches and of the memory's bandwidth is not in it.

Let c(t) be the cores that trainers take at a time t of a step without services, C all cores, and S what services take of them in
a step of T seconds. Then

    T = integral over the step without services of  max(1, c(t) / (C - S / T)) dt

which has one solution, as the right side falls with T.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.reorder_service.planning.batch import Batch, Floats, Slots
from headrace.reorder_service.planning.orchestration.candidate import Candidate
from headrace.reorder_service.planning.orchestration.cluster import Cluster
from headrace.reorder_service.planning.sharing import Sharing
from headrace.reorder_service.planning.simulation.eager_depth import planned_work
from headrace.reorder_service.planning.simulation.list_schedule import STAGE
from headrace.reorder_service.planning.simulation.shared_ranks import simulate_shared
from headrace.reorder_service.planning.simulation.simulator import timeline

_HALVINGS = 60
"""Of the interval in which a step's seconds are looked for: more than a float has bits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Computing:
    """What trainers compute in a step without services, in (a,) pieces."""

    start_s: Floats
    end_s: Floats
    trainers: Floats
    """How many are at a piece."""


def computing_of(candidate: Candidate, batch: Batch, slots: Slots, sharing: Sharing | None, step_s: float) -> Computing:
    """Return what trainers compute in the step of a plan. step_s: its seconds. Raises ValueError as the simulator does."""
    if candidate.placement == "colocated":
        return _of_colocated(batch, slots, step_s)
    slices = np.repeat([candidate.grids[unit].tp for unit in batch.units], list(batch.topology.stages.values()))
    if sharing is None:
        actions = timeline(planned_work(batch, slots))
        return Computing(start_s=actions.start_s, end_s=actions.end_s, trainers=slices[actions.stage].astype(np.float64))
    step = simulate_shared(batch, slots, sharing)
    return Computing(start_s=step.start_s, end_s=step.end_s, trainers=slices[step.actions[:, STAGE]].astype(np.float64))


def _of_colocated(batch: Batch, slots: Slots, step_s: float) -> Computing:
    """Return the same of ranks that have all units, and wait for each other behind every forward and backward of a microbatch."""
    loads = batch.loads(slots)
    passes = np.stack((loads.sum(axis=2), (loads * (batch.step_factors - 1)).sum(axis=2)), axis=2)  # (D, K, 2)
    longest = passes.max(axis=0).ravel()
    scale = step_s / longest.sum() if longest.any() else 0.0
    begins = np.tile(np.cumsum(longest) - longest, len(passes))
    start_s = scale * begins
    return Computing(start_s=start_s, end_s=start_s + scale * passes.ravel(), trainers=np.ones(start_s.size))


def beside_services_s(
    cluster: Cluster, computing: Computing, step_s: float, update_s: float, num_samples: int, ranks: int
) -> float:
    """Return the seconds of a step of so many samples, with the services on the trainers' cores.

    step_s: without services, and without the update of the weights, in which all ranks compute for so long.
    """
    assert cluster.cores_per_node is not None, "of shared cores only"
    times, at = np.unique(np.concatenate((computing.start_s, computing.end_s, [0.0, step_s])), return_inverse=True)
    change = np.zeros(times.size)
    count = computing.start_s.size
    np.add.at(change, at[:count], computing.trainers)
    np.subtract.at(change, at[count : 2 * count], computing.trainers)
    lengths = np.append(np.diff(times), update_s)
    wanted = cluster.threads * np.append(np.cumsum(change)[:-1], ranks)
    cores, each_s = cluster.nodes * cluster.cores_per_node - cluster.service_cores, num_samples * cluster.service_s_per_sample

    def seconds(of_step_s: float) -> float:
        left = cores - each_s / of_step_s
        return float((lengths * np.maximum(1.0, wanted / left)).sum()) if left > 0 else np.inf

    low = max(step_s + update_s, each_s / cores)
    if low == 0.0 or seconds(low) <= low:
        return low
    high = 2 * low
    while seconds(high) > high:
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) > middle else (low, middle)
    return high
