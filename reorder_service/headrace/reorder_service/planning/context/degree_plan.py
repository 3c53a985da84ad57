"""A degree of context parallelism for each sequence of a batch: short ones on one rank, long ones on several, of any number.

A fixed degree must hold the longest sequence of all, so that the many short ones pay for exchanges that they do not need, and the
ranks fall into few groups, which the long ones do not fill evenly. Here sequences are moldable parallel tasks: for a limit of
time, each gets the fewest ranks on which it keeps the limit (its canonical allotment; Turek, Wolf and Yu, 1992), and gangs are
scheduled the widest first. Of many limits the one with the shortest step is taken, and then the degrees of the sequences that
end last, and of those with the most work, are tried one up and one down.
"""

from __future__ import annotations

import itertools

import numpy as np

from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.context.gang_schedule import GangSchedule, schedule, step_time

_LIMITS = 48  # limits of time that are tried, at equal ratios from the lower bound of the step to the longest sequence
_TRIES = 256  # changes of a degree that are tried after that
_NEAR = 1.005  # times the lower bound: a step so short is left as it is
_LOOKED_AT = 8  # sequences that end last, and as many with the most work, whose degrees are changed


def least_degrees(tokens: Ints, num_ranks: int, tokens_per_rank: int) -> Ints:
    """Return the (n,) fewest ranks that hold the tokens of each sequence.

    Raises ValueError for a sequence that all ranks together do not hold.
    """
    if tokens_per_rank < 1:
        raise ValueError(f"a rank holds at least one token, got {tokens_per_rank}")
    least = np.maximum(1, -(-np.asarray(tokens, np.int64) // tokens_per_rank))
    if (too_long := np.flatnonzero(least > num_ranks)).size:
        row = too_long[0]
        raise ValueError(
            f"sequence {row} has {tokens[row]} tokens, which {num_ranks} ranks of {tokens_per_rank} tokens do not hold at any "
            f"degree of context parallelism: give it {least[row]} ranks, or cut samples to {num_ranks * tokens_per_rank} tokens"
        )
    return least


def lower_bound(seconds: Floats, least: Ints) -> float:
    """Return a time that no plan can be below: the least work of all sequences over the ranks, or the longest sequence."""
    allowed = _allowed(seconds, least)
    area = (allowed * np.arange(1, seconds.shape[1] + 1)).min(axis=1, initial=np.inf)
    return float(max(area.sum() / seconds.shape[1], allowed.min(axis=1, initial=np.inf).max(initial=0.0)))


def plan_degrees(seconds: Floats, least: Ints, ranks_per_node: int) -> GangSchedule:
    """Choose how many ranks each of n sequences takes, and which, so that the step is short.

    seconds: (n, R) of each sequence on 1 to R ranks, infinite where it cannot have so many. least: (n,) fewest ranks of each.
    The step is never longer than with any one degree for all that have no need of more, by the same schedule.

    Raises ValueError for a sequence that no number of ranks takes.
    """
    allowed, num_ranks = _allowed(seconds, least), seconds.shape[1]
    if (none := np.flatnonzero(np.isinf(allowed.min(axis=1, initial=np.inf)))).size:
        raise ValueError(
            f"sequence {none[0]} fits no degree of context parallelism from {least[none[0]]} to {num_ranks}: take smaller "
            "blocks, or ranks that hold more tokens"
        )
    if not len(seconds):
        return schedule(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0), num_ranks, ranks_per_node)
    low, high = lower_bound(seconds, least), float(np.max(allowed[np.arange(len(least)), _first(allowed)]))
    limits = np.geomspace(low, high, _LIMITS) if 0 < low < high else np.array([high])
    choices = [_within(allowed, limit) for limit in limits]
    choices += [_nearest(allowed, degree) for degree in range(1, num_ranks + 1)]
    best, least_time = choices[0], np.inf
    for degrees in {choice.tobytes(): choice for choice in choices}.values():
        time = _step_time(allowed, degrees, ranks_per_node)
        if time < least_time:
            best, least_time = degrees, time
    best = _improve(allowed, best, ranks_per_node, low)
    return schedule(_order(allowed, best), best, _seconds(allowed, best), num_ranks, ranks_per_node)


def fixed_degree(seconds: Floats, degree: int, ranks_per_node: int) -> GangSchedule:
    """Return the schedule of n sequences that all have the same number of ranks, on the groups that the ranks fall into.

    seconds: (n, R). Ranks that are left over by the groups are idle, as are those of a group that get no block of a sequence.
    """
    num_ranks = seconds.shape[1]
    taken = _seconds(seconds, _nearest(seconds, degree))
    order, used = np.argsort(-taken, kind="stable"), num_ranks // degree * degree
    return schedule(order, np.full(len(seconds), degree), taken, used, max(degree, ranks_per_node // degree * degree))


def _improve(allowed: Floats, degrees: Ints, ranks_per_node: int, bound: float) -> Ints:
    """Return degrees of which a few differ by one from these, if the step is then shorter, unless it is next to its bound."""
    best, time, tries = degrees, _step_time(allowed, degrees, ranks_per_node), 0
    while tries < _TRIES and time > bound * _NEAR:
        seconds = _seconds(allowed, best)
        ends = schedule(_order(allowed, best), best, seconds, allowed.shape[1], ranks_per_node).ends_s
        most = [np.argsort(-values, kind="stable")[:_LOOKED_AT] for values in (ends, seconds * best)]
        for row, change in itertools.product(np.concatenate(most), (1, -1)):
            degree = best[row] + change
            if not (1 <= degree <= allowed.shape[1] and np.isfinite(allowed[row, degree - 1])):
                continue
            tries += 1
            other = best.copy()
            other[row] = degree
            if (shorter := _step_time(allowed, other, ranks_per_node)) < time:
                best, time = other, shorter
                break
        else:
            break
    return best


def _allowed(seconds: Floats, least: Ints) -> Floats:
    degrees = np.arange(1, seconds.shape[1] + 1)
    return np.where(degrees >= least[:, None], seconds, np.inf)


def _first(allowed: Floats) -> Ints:
    """Return the column of the fewest ranks that each sequence can have."""
    column: Ints = np.isfinite(allowed).argmax(axis=1)
    return column


def _within(allowed: Floats, limit: float) -> Ints:
    """Return the fewest ranks on which each sequence keeps the limit, or the fastest number if it cannot."""
    keeps = allowed <= limit
    column: Ints = np.where(keeps.any(axis=1), keeps.argmax(axis=1), allowed.argmin(axis=1))
    return column + 1


def _nearest(allowed: Floats, degree: int) -> Ints:
    """Return for each sequence the number of ranks that it can have next to `degree`, from below if there is one."""
    columns = np.arange(allowed.shape[1])
    finite = np.isfinite(allowed)
    below = np.where(finite & (columns < degree), columns, -1).max(axis=1)
    column: Ints = np.where(below >= 0, below, _first(allowed))
    return column + 1


def _seconds(allowed: Floats, degrees: Ints) -> Floats:
    return np.ascontiguousarray(allowed[np.arange(degrees.size), degrees - 1])


def _order(allowed: Floats, degrees: Ints) -> Ints:
    """Widest first, and of equally wide ones the longest."""
    return np.lexsort((-_seconds(allowed, degrees), -degrees))


def _step_time(allowed: Floats, degrees: Ints, ranks_per_node: int) -> float:
    seconds = _seconds(allowed, degrees)
    return float(step_time(_order(allowed, degrees), degrees, seconds, allowed.shape[1], ranks_per_node))
