"""The loops of DistTrain's search as published: the convex problem for each choice of dp and tp, and its rounding."""

from __future__ import annotations

import numpy as np

from headrace.jit import kernel
from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.orchestration.searches.placement_kernels import (
    BATCH,
    CHUNKS,
    EVEN,
    GENERATOR_UNIT,
    LLM_UNIT,
    MICROBATCH,
    NUM_GPUS,
    held_microbatches,
)

PAIR_WORK, PAIR_STATE, PAIR_KEPT, PAIR_LEAST, PAIR_LAYERS = range(5)  # rows of what `relaxed` gets of each pair


@kernel
def level_with_gpus(work: Floats, least: Floats, most: Floats, gpus: float) -> float:
    """Return the least that the slowest of U units takes on so many GPUs, of which x to a unit let it take work / x.

    work: (U,). least, most: (U,) GPUs that a unit may have. Infinite if the least are too many. This is the optimum of the convex
    problem for given dp and tp: units take equally long but for those that have their least GPUs, or one that has its most.
    """
    level, needed = 0.0, 0.0
    for u in range(work.size):
        level = max(level, work[u] / most[u])
        needed += least[u]
    if needed > gpus:
        return np.inf
    floor = level
    is_free = np.ones(work.size, np.bool_)
    while True:
        of_free, left = 0.0, gpus
        for u in range(work.size):
            if is_free[u]:
                of_free += work[u]
            else:
                left -= least[u]
        if of_free == 0.0:
            return level
        level = max(floor, of_free / left)
        is_settled = True
        for u in range(work.size):
            if is_free[u] and work[u] < least[u] * level * (1 - EVEN):
                is_free[u] = is_settled = False
        if is_settled:
            return level


@kernel
def _filling(rates: Floats, shape: Ints, chosen: Ints, samples: int, count: int) -> float:
    """Return the seconds of a microbatch in the first `count` units, of which encoders run side by side."""
    encoders, filling = 0.0, 0.0
    for u in range(count):
        whole = samples * rates[PAIR_WORK, chosen[u]]
        if u in (shape[LLM_UNIT], shape[GENERATOR_UNIT]):
            filling += whole
        else:
            encoders = max(encoders, whole)
    return encoders + filling


@kernel
def _round_down(
    pairs: Ints, rates: Floats, shape: Ints, usable: float, chosen: Ints, work: Floats, least: Floats, most: Floats,
    slowest: float, stages: Ints,
) -> bool:  # fmt: skip
    """Fill the whole numbers of stages of a solution, and return whether they fit the GPUs and their memory."""
    num_units, llm, generator = chosen.size, shape[LLM_UNIT], shape[GENERATOR_UNIT]
    gpus = 0
    for u in range(num_units):
        width = pairs[0, chosen[u]] * pairs[1, chosen[u]]
        given = most[u] if slowest == 0.0 else min(most[u], max(least[u], work[u] / slowest))
        stages[u] = max(int(given / width + 1e-9), int(np.ceil(least[u] / width - 1e-9)))
        gpus += stages[u] * width
    if gpus > shape[NUM_GPUS]:
        return False
    samples = pairs[0, chosen[llm]] * shape[MICROBATCH]
    behind_llm = stages[generator] if generator >= 0 else 0
    deepest = 0
    for u in range(num_units):
        after = 0 if u == generator else (behind_llm if u == llm else behind_llm + stages[llm])
        deepest = max(deepest, stages[u] - 1 + after)
    for u in range(num_units):
        q = chosen[u]
        after = 0 if u == generator else (behind_llm if u == llm else behind_llm + stages[llm])
        held = held_microbatches(shape, shape[BATCH] // samples, stages[u], after, deepest)
        layers = int(rates[PAIR_LAYERS, q])
        share = -(-layers // stages[u]) / layers
        if (rates[PAIR_STATE, q] + held * samples * rates[PAIR_KEPT, q]) * share > usable:
            return False
    return True


@kernel
def relaxed(
    pairs: Ints, rates: Floats, first: Ints, shape: Ints, usable: float, replicas: int, ceiling: float, chosen_of_best: Ints,
    stages_of_best: Ints,
) -> float:  # fmt: skip
    """Return the seconds of DistTrain's convex problem with so many LLM replicas, at the least that is feasible once rounded.

    pairs: (2, P) dp and tp. rates: (5, P) seconds of the unit, bytes of its state and of what one slice keeps, per sample of
    the job but for the state, and the least stages that memory asks for, and most. first: (U + 1,) the pairs of unit u are
    first[u] .. first[u + 1] - 1. shape: of `OptionTable`. ceiling: seconds that are no result any more. chosen_of_best,
    stages_of_best: (U,), receive the pairs and whole numbers of stages.
    """
    num_units, llm, num_gpus = first.size - 1, shape[LLM_UNIT], shape[NUM_GPUS]
    samples = replicas * shape[MICROBATCH]
    microbatches = shape[BATCH] // samples
    best = ceiling
    at = first[:-1].copy()
    work, least, most = np.zeros(num_units), np.zeros(num_units), np.zeros(num_units)
    stages = np.zeros(num_units, np.int64)
    level = 0
    while level >= 0:
        if level == num_units:
            slowest = level_with_gpus(work, least, most, float(num_gpus))
            seconds = _filling(rates, shape, at, samples, level) / shape[CHUNKS] + (microbatches - 1) * slowest
            if seconds < best * (1 - EVEN) and _round_down(pairs, rates, shape, usable, at, work, least, most, slowest, stages):
                best = seconds
                chosen_of_best[:] = at
                stages_of_best[:] = stages
        elif at[level] < first[level + 1]:
            q = at[level]
            width = pairs[0, q] * pairs[1, q]
            work[level] = samples * rates[PAIR_WORK, q] * width
            least[level], most[level] = rates[PAIR_LEAST, q] * width, rates[PAIR_LAYERS, q] * width
            of_work, needed = 0.0, 0.0
            for u in range(level + 1):
                of_work += work[u]
                needed += least[u]
            slowest = max(of_work / num_gpus, work[level] / most[level])
            bound = _filling(rates, shape, at, samples, level + 1) / shape[CHUNKS] + (microbatches - 1) * slowest
            is_possible = pairs[0, q] <= samples and (level != llm or pairs[0, q] == replicas) and least[level] <= most[level]
            if is_possible and needed <= num_gpus and bound <= best:
                level += 1
                if level < num_units:
                    at[level] = first[level]
                continue
            at[level] += 1
            continue
        level -= 1
        if level >= 0:
            at[level] += 1
    return best
