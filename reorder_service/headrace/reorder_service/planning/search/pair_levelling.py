"""Levelling of bins in pairs: a heavy bin and a light one exchange samples, so that both weigh nearly the same.

Every round pairs the heaviest bins with the lightest ones, so that a few rounds level all of them. A pair with few samples is
divided anew, by differencing (Karmarkar and Karp, 1982): the two heaviest samples are set apart, one in each bin, and replaced
by their difference, until one number is left, by which the bins differ. With a dozen samples it is a tiny part of the lightest
one. Where there are many samples, or where that would give a bin too many tokens, the best two samples are swapped.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.jit import kernel
from headrace.reorder_service.planning.batch import Floats, Ints

_ROUNDS = 256  # at most; most batches are level after 4 to 8
_PATIENCE = 16  # rounds in a row that may change nothing
_FEW = 32  # most samples of a pair that is divided anew
_LEAST_GAIN = 1e-12  # less may be a rounding error


@kernel
def level_pairs(weights: Floats, order: Ints, heads: Floats, goal: float, tokens: Ints, limit: int, bins: Ints) -> None:
    """Level the loads of B bins by exchanging the samples of pairs: changes `bins` (n,), the bin of each sample, in place.

    order: (n,) samples by falling weight. heads: (B,) not negative, loads that the bins have without any sample. goal: load up to
    which a bin is left alone. tokens: (n,), of which no bin gets more than `limit` if none has more. The heaviest bin never gets
    heavier. O(n + B log B) a round.
    """
    loads, used = heads.copy(), np.zeros(heads.size, np.int64)
    for i in range(bins.size):
        loads[bins[i]] += weights[i]
        used[bins[i]] += tokens[i]
    vain = 0
    for turn in range(_ROUNDS):
        pairs = _pairs(loads, goal, turn)
        if vain == _PATIENCE or pairs.size == 0:
            break
        vain += 1
        samples, ends = _by_bin(order, bins, pairs.ravel(), heads.size)
        for p in range(len(pairs)):
            heavy, light = pairs[p]
            gap = loads[heavy] - loads[light]
            room = limit - used[heavy], limit - used[light]
            of_heavy, of_light = samples[ends[2 * p] : ends[2 * p + 1]], samples[ends[2 * p + 1] : ends[2 * p + 2]]
            moved, extra = 0.0, 0
            if of_heavy.size + of_light.size <= _FEW:
                moved, extra = _divide_anew(weights, tokens, of_heavy, of_light, gap, room, heavy, light, bins)
            if moved == 0.0:
                moved, extra = _swap(weights, tokens, of_heavy, of_light, gap, room, heavy, light, bins)
            if moved > 0.0:
                loads[heavy] -= moved
                loads[light] += moved
                used[heavy] -= extra
                used[light] += extra
                vain = 0


@kernel
def _pairs(loads: Floats, goal: float, turn: int) -> Ints:
    """Return (p, 2) pairs of a bin heavier than `goal` and a light one, all different: the heaviest first, with the lightest.

    In later turns the light bins are shifted by as many places, since a bin that had no use of one partner may have of another.
    """
    half = loads.size // 2
    rising = np.argsort(loads, kind="mergesort")
    count = 0
    while count < half and loads[rising[loads.size - 1 - count]] > goal:
        count += 1
    pairs = np.empty((count, 2), np.int64)
    for p in range(count):
        pairs[p] = rising[loads.size - 1 - p], rising[(p + turn) % half]
    return pairs


@kernel
def _by_bin(order: Ints, bins: Ints, wanted: Ints, num_bins: int) -> tuple[Ints, Ints]:
    """Return the samples of the w wanted bins, one bin after the other and in the given order, and (w + 1,) where bins begin."""
    place = np.full(num_bins, -1)
    place[wanted] = np.arange(wanted.size)
    ends = np.zeros(wanted.size + 1, np.int64)
    found = np.empty(order.size, np.int64)
    count = 0
    for i in order:
        if place[bins[i]] >= 0:
            found[count] = i
            count += 1
            ends[place[bins[i]] + 1] += 1
    ends = np.cumsum(ends)
    samples, filled = np.empty(count, np.int64), ends.copy()
    for i in found[:count]:
        at = place[bins[i]]
        samples[filled[at]] = i
        filled[at] += 1
    return samples, ends


@kernel
def _swap(
    weights: Floats,
    tokens: Ints,
    of_heavy: Ints,
    of_light: Ints,
    gap: float,
    room: tuple[int, int],
    heavy: int,
    light: int,
    bins: Ints,
) -> tuple[float, int]:
    """Swap one sample of the heavy bin for one of the light bin, or for none, so that their loads come as close as they can.

    of_heavy, of_light: samples of the bins by falling weight. gap: by how much the heavy bin is heavier. room: tokens that the
    two bins can still take. Returns the load and the tokens that leave the heavy bin for the light one, zeros if nothing helps.
    """
    out, back, least = -1, -1, gap * (1.0 - _LEAST_GAIN)
    best, best_extra = 0.0, 0
    p = 0
    for i in of_heavy:
        while p < of_light.size and 2.0 * (weights[i] - weights[of_light[p]]) < gap:
            p += 1
        for q, step in ((p - 1, -1), (p, 1)):  # partners with which too little is moved, and too much; behind the last: none
            while 0 <= q <= of_light.size:
                j = of_light[q] if q < of_light.size else -1
                moved = weights[i] - (weights[j] if j >= 0 else 0.0)
                extra = tokens[i] - (tokens[j] if j >= 0 else 0)
                if abs(gap - 2.0 * moved) >= least:
                    break  # and the next ones are further off
                if extra <= room[1] and -extra <= room[0]:
                    out, back, least = i, j, abs(gap - 2.0 * moved)
                    best, best_extra = moved, extra
                q += step
    if out >= 0:
        bins[out] = light
    if back >= 0:
        bins[back] = heavy
    return best, best_extra


@kernel
def _divide_anew(
    weights: Floats,
    tokens: Ints,
    of_heavy: Ints,
    of_light: Ints,
    gap: float,
    room: tuple[int, int],
    heavy: int,
    light: int,
    bins: Ints,
) -> tuple[float, int]:
    """Divide the samples of both bins anew so that their loads come close: arguments and result as for `_swap`.

    What the bins carry besides samples differs by a number that takes part like a sample of the bin that has more.
    """
    samples = np.concatenate((of_heavy, of_light))
    head = gap
    for i in of_heavy:
        head -= weights[i]
    for i in of_light:
        head += weights[i]
    values = np.empty(samples.size + 1)
    values[0] = abs(head)
    values[1:] = weights[samples]
    falling = np.argsort(-values, kind="mergesort")
    part = divide(values[falling])
    first = np.empty(values.size, np.bool_)
    first[falling] = part
    in_heavy = first == first[0] if head >= 0 else first != first[0]  # so the head stays where it is
    new_gap, extra = head, 0
    for p in range(samples.size):
        new_gap += weights[samples[p]] if in_heavy[p + 1] else -weights[samples[p]]
        if in_heavy[p + 1] != (p < of_heavy.size):
            extra += tokens[samples[p]] if p < of_heavy.size else -tokens[samples[p]]
    if abs(new_gap) >= gap * (1.0 - _LEAST_GAIN) or extra > room[1] or -extra > room[0]:
        return 0.0, 0
    for p in range(samples.size):
        bins[samples[p]] = heavy if in_heavy[p + 1] else light
    return (gap - new_gap) / 2.0, extra


@kernel
def divide(falling: Floats) -> NDArray[np.bool_]:
    """Divide m >= 1 falling numbers, none negative, into two parts of nearly the same sum, by differencing: (m,) part of each.

    O(m^2), for small m.
    """
    count = falling.size
    values, node = falling.copy(), np.arange(count)
    kept, apart = np.empty(count, np.int64), np.empty(count, np.int64)
    for start in range(count - 1):
        difference, hole = values[start] - values[start + 1], start + 1
        kept[start], apart[start] = node[start], node[start + 1]
        while hole + 1 < count and values[hole + 1] > difference:
            values[hole], node[hole] = values[hole + 1], node[hole + 1]
            hole += 1
        values[hole], node[hole] = difference, kept[start]
    part = np.zeros(count, np.bool_)
    for start in range(count - 2, -1, -1):
        part[apart[start]] = not part[kept[start]]
    return part
