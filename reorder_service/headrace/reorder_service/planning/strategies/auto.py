"""Strategy `auto`: simulate the plans of all other strategies and take the fastest one that can be run."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from headrace.reorder_service.planning.batch import Batch, Slots
from headrace.reorder_service.planning.simulation.memory_limit import excess_memory
from headrace.reorder_service.planning.simulation.screening import num_screened, seconds_of_first, seconds_within
from headrace.reorder_service.planning.simulation.shared_ranks import simulate_shared

_SMALL = 256  # samples of a batch for which every strategy is asked: it takes no time to see whether its plan can be run


def fastest(
    batch: Batch,
    candidates: Mapping[str, Callable[[Batch], Slots]],
    *,
    crossing: Collection[str] = (),
    of_first: Mapping[str, Callable[[Batch, int], Slots]] | None = None,
) -> tuple[str, Slots]:
    """Return the name and the slots of the candidate with the shortest simulated step; the first one wins a tie.

    Plans in which a sample changes its replica between units are left out unless the execution has `may_cross_replicas`; the
    strategies named in `crossing`, which balance each unit by itself, are then not even asked, except in small batches. Where no
    plan keeps the execution's memory limit, the one that exceeds it least is taken. Raises ValueError if no candidate's
    plan can be run with the execution's schedule.

    of_first: for strategies that deal samples to replicas and then plan each replica by itself, a function that returns their
    plan with the slots of the first replicas only. If those alone take longer than another plan, the others are not planned.
    """
    best: tuple[float, float, str, Slots] | None = None
    refusal: ValueError | None = None
    sharing = batch.execution.sharing
    for name, strategy in reversed(list(candidates.items())):  # the last are the best as a rule, and rule out others
        if name in crossing and _would_cross(batch):
            continue
        least = math.inf if best is None or best[0] > 0 else best[1]
        try:
            few = num_screened(batch) if of_first and name in of_first and least < math.inf and sharing is None else 0
            if few and of_first and seconds_of_first(batch, of_first[name](batch, few), few) > least:
                continue
            slots = strategy(batch)
            if not batch.execution.may_cross_replicas and batch.crosses_replicas(slots):
                continue
            seconds = seconds_within(batch, slots, least) if sharing is None else simulate_shared(batch, slots, sharing).step_s
        except ValueError as err:  # the plan defers more than the schedule can wait for
            refusal = err
            continue
        if seconds == math.inf:
            continue
        over = excess_memory(batch, slots)
        if best is None or (over, seconds) <= best[:2]:
            best = (over, seconds, name, slots)
    if best is None:
        raise refusal or ValueError("auto needs at least one candidate")
    return best[2], best[3]


def _would_cross(batch: Batch) -> bool:
    """Return whether units that are balanced apart take samples to different replicas, and may not."""
    may_cross = batch.execution.may_cross_replicas or batch.topology.replicas == 1 or len(batch.units) == 1
    return not may_cross and batch.sample_ids.size > _SMALL
