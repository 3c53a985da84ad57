"""The loops of DistTrain's searches over an `OptionTable`: the exact integer optimum, and what both searches judge by.

A choice is one option of each unit. Its step is that of `estimate.step_s`, its memory that of `estimate.memory_bytes`.
"""

from __future__ import annotations

import numpy as np

from headrace.jit import kernel
from headrace.reorder_service.planning.batch import Floats, Ints

# Rows of `OptionTable.sizes`, `.rates` and `.shape`.
DP, TP, PP, GPUS = 1, 2, 3, 4
WORK, STAGE, PATH, WAIT, EXCHANGE, STATE, KEPT = range(7)
NUM_GPUS, LLM_UNIT, GENERATOR_UNIT, BATCH, MICROBATCH, SCHEDULE, CHUNKS = range(7)
GPIPE, EAGER, ZERO_BUBBLE = 2, 3, 4  # indices in SCHEDULES

EVEN = 1e-12  # relative difference of two times that are the same but for rounding


@kernel
def step_of(rates: Floats, sizes: Ints, shape: Ints, chosen: Ints) -> float:
    """Return the seconds of a step of the chosen options."""
    llm, generator = shape[LLM_UNIT], shape[GENERATOR_UNIT]
    samples = sizes[DP, chosen[llm]] * shape[MICROBATCH]
    microbatches = shape[BATCH] // samples
    encoders, filling, slowest, exchange = 0.0, 0.0, 0.0, 0.0
    for u in range(chosen.size):
        j = chosen[u]
        path = samples * rates[PATH, j] + rates[WAIT, j]
        if u in (llm, generator):
            filling += path
        else:
            encoders = max(encoders, path)
        slowest = max(slowest, samples * rates[STAGE, j])
        exchange = max(exchange, rates[EXCHANGE, j])
    seconds: float = (encoders + filling) / shape[CHUNKS] + (microbatches - 1) * slowest + exchange
    return seconds


@kernel
def held_microbatches(shape: Ints, microbatches: int, pp: int, after: int, deepest: int) -> float:
    """Return the microbatches that a unit's first stage keeps (`estimate.in_flight`). after: stages of the units behind it."""
    behind = pp - 1 + after
    if shape[SCHEDULE] == GPIPE or (shape[SCHEDULE] == EAGER and behind > 0):
        return float(microbatches)
    held = float((deepest if shape[SCHEDULE] == ZERO_BUBBLE else behind) + 1)
    if shape[CHUNKS] > 1:
        held += 2 * after + 2 * (pp - 1) / shape[CHUNKS] + (deepest if after > 0 else 1)
    return min(held, float(microbatches))


@kernel
def holds(rates: Floats, sizes: Ints, shape: Ints, usable: float, chosen: Ints) -> bool:
    """Return whether the chosen options fit the memory of every GPU."""
    llm, generator = shape[LLM_UNIT], shape[GENERATOR_UNIT]
    samples = sizes[DP, chosen[llm]] * shape[MICROBATCH]
    behind_llm = sizes[PP, chosen[generator]] if generator >= 0 else 0
    behind_encoders = sizes[PP, chosen[llm]] + behind_llm
    deepest = 0
    for u in range(chosen.size):
        after = 0 if u == generator else (behind_llm if u == llm else behind_encoders)
        deepest = max(deepest, sizes[PP, chosen[u]] - 1 + after)
    for u in range(chosen.size):
        j = chosen[u]
        after = 0 if u == generator else (behind_llm if u == llm else behind_encoders)
        held = held_microbatches(shape, shape[BATCH] // samples, sizes[PP, j], after, deepest)
        if rates[STATE, j] + held * samples * rates[KEPT, j] > usable:
            return False
    return True


@kernel
def _may_hold(rates: Floats, sizes: Ints, shape: Ints, usable: float, unit: int, j: int, samples: int, llm_stages: int) -> bool:
    """Return whether an option fits the memory if the LLM has so many stages and all other units have one."""
    llm, generator = shape[LLM_UNIT], shape[GENERATOR_UNIT]
    behind_llm = 1 if generator >= 0 else 0
    after = 0 if unit == generator else (behind_llm if unit == llm else llm_stages + behind_llm)
    deepest = max(llm_stages - 1 + behind_llm, sizes[PP, j] - 1 + after)
    held = held_microbatches(shape, shape[BATCH] // samples, sizes[PP, j], after, deepest)
    taken: float = rates[STATE, j] + held * samples * rates[KEPT, j]
    return taken <= usable


@kernel
def _fill_staircases(
    rates: Floats,
    sizes: Ints,
    first: Ints,
    shape: Ints,
    usable: float,
    samples: int,
    llm_stages: int,
    whole: Floats,
    stage: Floats,
) -> None:
    """Fill two (U, N + 1) arrays: the least seconds of a microbatch in a unit, and in its slowest stage, with so many GPUs.

    They are infinite where the unit has no option of so few GPUs that may hold its memory, and never increase along an axis.
    """
    whole[:] = np.inf
    stage[:] = np.inf
    for u in range(first.size - 1):
        if u == shape[LLM_UNIT]:
            continue
        for j in range(first[u], first[u + 1]):
            if sizes[DP, j] <= samples and _may_hold(rates, sizes, shape, usable, u, j, samples, llm_stages):
                g = sizes[GPUS, j]
                whole[u, g] = min(whole[u, g], samples * rates[PATH, j] + rates[WAIT, j])
                stage[u, g] = min(stage[u, g], samples * rates[STAGE, j])
        for g in range(1, whole.shape[1]):
            whole[u, g] = min(whole[u, g], whole[u, g - 1])
            stage[u, g] = min(stage[u, g], stage[u, g - 1])


@kernel
def _fill_least(shape: Ints, whole: Floats, least: Ints) -> int:
    """Fill (U,) least GPUs of every unit but the LLM, and return their sum, which is beyond the cluster if one has none."""
    total = 0
    for u in range(least.size):
        least[u] = 0
        if u != shape[LLM_UNIT]:
            while least[u] < whole.shape[1] - 1 and whole[u, least[u]] == np.inf:
                least[u] += 1
            total += least[u] if whole[u, least[u]] < np.inf else whole.shape[1]
    return total


@kernel
def _least_slowest(stage: Floats, llm: int, least: Ints, gpus: int) -> float:
    """Return the least that the slowest stage of all units but the LLM can take on so many GPUs together.

    Bisection over the staircases: a limit is feasible if the least GPUs with which each unit keeps it are not too many.
    """
    low, high, spare = 0.0, 0.0, gpus
    for u in range(stage.shape[0]):
        spare -= least[u]
    for u in range(stage.shape[0]):
        if u != llm:
            low = max(low, stage[u, least[u] + spare])
            high = max(high, stage[u, least[u]])
    while high - low > 1e-4 * high:
        middle = 0.5 * (low + high)
        needed = 0
        for u in range(stage.shape[0]):
            if u == llm:
                continue
            below, above = least[u] - 1, least[u] + spare + 1  # stage[below] > middle >= stage[above]
            while above - below > 1:
                at = (below + above) // 2
                if stage[u, at] <= middle:
                    above = at
                else:
                    below = at
            needed += above
        if needed <= gpus:
            high = middle
        else:
            low = middle
    return low


@kernel
def _bound(
    rates: Floats, shape: Ints, whole: Floats, stage: Floats, least: Ints, chosen: Ints, samples: int, room: int, slowest: float
) -> float:
    """Return seconds that no completion of a partial choice beats.

    chosen: -1 for units that are still open, each of which reaches at best what its staircase says for its least GPUs and `room`
    more. slowest: what the slowest stage takes at least.
    """
    encoders, filling, exchange = 0.0, 0.0, 0.0
    for u in range(chosen.size):
        j = chosen[u]
        if j >= 0:
            path, one = samples * rates[PATH, j] + rates[WAIT, j], samples * rates[STAGE, j]
            exchange = max(exchange, rates[EXCHANGE, j])
        else:
            path, one = whole[u, least[u] + room], stage[u, least[u] + room]
        slowest = max(slowest, one)
        if u in (shape[LLM_UNIT], shape[GENERATOR_UNIT]):
            filling += path
        else:
            encoders = max(encoders, path)
    seconds: float = (encoders + filling) / shape[CHUNKS] + (shape[BATCH] // samples - 1) * slowest + exchange
    return seconds


@kernel
def _promising(
    rates: Floats, sizes: Ints, first: Ints, shape: Ints, usable: float, whole: Floats, stage: Floats, least: Ints, chosen: Ints,
    samples: int, room: int, best: float, unit: int, lists: Ints, keys: Floats,
) -> int:  # fmt: skip
    """Write into row `unit` of lists and keys its options whose bound is no worse than `best`, best first, and return how many.

    chosen: the LLM's option, else -1. room: GPUs that are left beyond the least of every other unit.
    """
    number = 0
    llm_stages = sizes[PP, chosen[shape[LLM_UNIT]]]
    for j in range(first[unit], first[unit + 1]):
        left = room + least[unit] - sizes[GPUS, j]
        if left < 0:
            break  # options are ordered by GPUs
        if sizes[DP, j] > samples or not _may_hold(rates, sizes, shape, usable, unit, j, samples, llm_stages):
            continue
        chosen[unit] = j
        bound = _bound(rates, shape, whole, stage, least, chosen, samples, left, 0.0)
        if bound <= best * (1 + EVEN):
            lists[unit, number], keys[unit, number] = j, bound
            number += 1
    chosen[unit] = -1
    ranks = np.argsort(keys[unit, :number])
    lists[unit, :number] = lists[unit, :number][ranks]
    keys[unit, :number] = keys[unit, :number][ranks]
    return number


@kernel
def exact(
    rates: Floats, sizes: Ints, first: Ints, shape: Ints, usable: float, replicas: int, ceiling: float, chosen_of_best: Ints
) -> float:
    """Return the seconds of the fastest choice with so many LLM replicas, and of equal ones of that of fewest GPUs.

    ceiling: seconds that a choice must not exceed; if all do, it is returned. chosen_of_best: (U,), receives the options.

    Branch and bound. An option of the LLM leaves GPUs for the other units, and staircases say what these can reach with them at
    best, each by itself, and the slowest of them all together. LLM options are taken in the order of that bound, then options of
    the other units in the order of theirs, until the bound is no better than the best choice so far.
    """
    num_units, llm, num_gpus = first.size - 1, shape[LLM_UNIT], shape[NUM_GPUS]
    samples = replicas * shape[MICROBATCH]
    best, best_gpus, most = ceiling, num_gpus + 1, 1
    for u in range(num_units):
        most = max(most, first[u + 1] - first[u])
    chosen, least, order = np.full(num_units, -1, np.int64), np.zeros(num_units, np.int64), np.zeros(num_units, np.int64)
    whole, stage = np.zeros((num_units, num_gpus + 1)), np.zeros((num_units, num_gpus + 1))
    lists, keys = np.zeros((num_units, most), np.int64), np.zeros((num_units, most))
    count, at, left_at = np.zeros(num_units, np.int64), np.zeros(num_units, np.int64), np.zeros(num_units + 1, np.int64)
    open_units = 0
    for u in range(num_units):
        if u != llm:
            order[open_units] = u
            open_units += 1

    bounds = np.full(first[llm + 1] - first[llm], np.inf)
    depth_of_stairs = 0
    others = 0
    for i in range(bounds.size):  # in the order of their stages, so that each staircase is filled once
        j = first[llm] + i
        if sizes[DP, j] != replicas or not _may_hold(rates, sizes, shape, usable, llm, j, samples, sizes[PP, j]):
            continue
        if (samples * rates[PATH, j]) / shape[CHUNKS] + (shape[BATCH] // samples - 1) * samples * rates[STAGE, j] > best:
            continue
        if depth_of_stairs != sizes[PP, j]:
            depth_of_stairs = sizes[PP, j]
            _fill_staircases(rates, sizes, first, shape, usable, samples, depth_of_stairs, whole, stage)
            others = _fill_least(shape, whole, least)
        left = num_gpus - sizes[GPUS, j]
        if left >= others:
            chosen[llm] = j
            slowest = _least_slowest(stage, llm, least, left)
            bounds[i] = _bound(rates, shape, whole, stage, least, chosen, samples, left - others, slowest)

    while True:
        i = int(np.argmin(bounds))
        if bounds[i] == np.inf or bounds[i] > best * (1 + EVEN):
            break
        bounds[i] = np.inf
        chosen[:] = -1
        chosen[llm] = first[llm] + i
        if depth_of_stairs != sizes[PP, chosen[llm]]:
            depth_of_stairs = sizes[PP, chosen[llm]]
            _fill_staircases(rates, sizes, first, shape, usable, samples, depth_of_stairs, whole, stage)
            others = _fill_least(shape, whole, least)
        left_at[0] = num_gpus - sizes[GPUS, chosen[llm]]
        for u in order[:open_units]:
            count[u] = _promising(
                rates,
                sizes,
                first,
                shape,
                usable,
                whole,
                stage,
                least,
                chosen,
                samples,
                left_at[0] - others,
                best,
                u,
                lists,
                keys,
            )
        level = 0
        at[:] = 0
        while level >= 0:  # depth first through the options of the other units
            if level == open_units:
                gpus, seconds = num_gpus - left_at[level], step_of(rates, sizes, shape, chosen)
                better = seconds < best * (1 - EVEN) or (seconds <= best * (1 + EVEN) and gpus < best_gpus)
                if better and holds(rates, sizes, shape, usable, chosen):
                    best, best_gpus = seconds, gpus
                    chosen_of_best[:] = chosen
                level -= 1
                continue
            u = order[level]
            if at[u] >= count[u] or keys[u, at[u]] > best * (1 + EVEN):
                chosen[u], at[u] = -1, 0
                level -= 1
                continue
            chosen[u] = lists[u, at[u]]
            at[u] += 1
            left = left_at[level] - sizes[GPUS, chosen[u]]
            room = left
            for v in order[level + 1 : open_units]:
                room -= least[v]
            if room < 0 or _bound(rates, shape, whole, stage, least, chosen, samples, room, 0.0) > best * (1 + EVEN):
                continue
            level += 1
            left_at[level] = left
    return best
