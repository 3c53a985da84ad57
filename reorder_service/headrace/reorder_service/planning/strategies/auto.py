"""Strategy `auto`: simulate the plans of all other strategies and take the fastest one that can be run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from headrace.reorder_service.planning.batch import Batch, Slots
from headrace.reorder_service.planning.simulation.eager_depth import planned_work
from headrace.reorder_service.planning.simulation.simulator import peak_memory, simulate


def fastest(batch: Batch, candidates: Mapping[str, Callable[[Batch], Slots]]) -> tuple[str, Slots]:
    """Return the name and the slots of the candidate with the shortest simulated step; the first one wins a tie.

    Plans in which a sample changes its replica between units are skipped unless the execution has `may_cross_replicas`. Plans
    that hold more activations than the execution's memory limit are taken only if all do. Raises ValueError if no candidate's
    plan can be run with the execution's schedule.
    """
    best: tuple[bool, float, str, Slots] | None = None
    refusal: ValueError | None = None
    for name, strategy in candidates.items():
        try:
            slots = strategy(batch)
            if not batch.execution.may_cross_replicas and batch.crosses_replicas(slots):
                continue
            work = planned_work(batch, slots)
            seconds = simulate(work).iteration_s
        except ValueError as err:  # the plan defers more than the schedule can wait for
            refusal = err
            continue
        limit = batch.execution.memory_limit
        over = bool(np.isfinite(limit)) and float(peak_memory(work).max()) > limit
        if best is None or (over, seconds) < best[:2]:
            best = (over, seconds, name, slots)
    if best is None:
        raise refusal or ValueError("auto needs at least one candidate")
    return best[2], best[3]
