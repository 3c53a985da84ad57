"""Which pipelines the nodes there are make, and how many microbatches each takes (Oobleck, dissertation section 2.4.2).

A step takes as long as its slowest pipeline. Both choices are therefore made for the longest time of a pipeline first, and the
spread of the times (equation 2.6) decides between what is equally fast.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.errors import UserError
from headrace.jit import kernel
from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.recovery.templates import Template, Templates


@dataclass(frozen=True, slots=True, kw_only=True)
class Instantiation:
    """Pipelines that use all nodes."""

    templates: tuple[Template, ...]
    """Of each pipeline, the largest first."""
    microbatches: tuple[int, ...]
    """Of each pipeline."""
    iteration_s: float
    """Predicted seconds of a step."""


def instantiate(templates: Templates, num_nodes: int, global_batch: int, microbatch: int) -> Instantiation:
    """Of all sets of pipelines that use `num_nodes` nodes and outnumber the failures to survive, the one with the shortest step.

    Whether a step can take theta seconds is a coin change problem: of pipelines whose nodes add up to all nodes, those that do
    the most microbatches in that time. The least theta in which they do enough is found by bisection over the times that a
    pipeline can take.

    global_batch, microbatch: numbers of samples. Raises UserError where nodes or the global batch cannot be divided; the
    message then names the nearest global batch that can.
    """
    specification = templates.specification
    if num_nodes < specification.least_nodes or specification.usable(num_nodes) < num_nodes:
        raise UserError(
            f"{num_nodes} nodes are not {specification.max_failures + 1} or more pipelines of {specification.smallest} to "
            f"{specification.largest} nodes: use {max(specification.least_nodes, specification.usable(num_nodes))} nodes"
        )
    fewest = max(specification.max_failures + 1, -(-num_nodes // specification.largest))
    num_microbatches = _split(global_batch, microbatch, fewest)
    most = min(num_nodes // specification.smallest, num_microbatches)
    sizes = np.array(specification.sizes)
    opening, pace = _opening_and_pace([templates.of_size[size] for size in specification.sizes])
    seconds = opening[:, None] + pace[:, None] * np.arange(1, num_microbatches + 1)

    def pipelines(within_s: float) -> Ints:
        capacity = (seconds <= within_s).sum(axis=1)
        return _change(sizes, capacity, num_nodes, fewest, most, num_microbatches)

    times = np.unique(seconds)
    low, high = 0, times.size - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if pipelines(times[middle]).size else (middle + 1, high)
    chosen = tuple(templates.of_size[size] for size in sorted(pipelines(times[low]).tolist(), reverse=True))
    microbatches = distribute(chosen, num_microbatches)
    return Instantiation(
        templates=chosen,
        microbatches=microbatches,
        iteration_s=max(template.iteration_s(count) for template, count in zip(chosen, microbatches, strict=True)),
    )


def distribute(pipelines: Sequence[Template], num_microbatches: int) -> tuple[int, ...]:
    """How many microbatches each pipeline takes, at least one: those of the shortest step, and of these the ones whose times
    spread least (the least sum of squared distances from their mean).

    The longest time: the next microbatch goes to the pipeline that would be done with it first. The spread: with a fixed mu in
    place of the mean, the sum is separable and convex, so that it is least where moving no single microbatch lowers it. The
    best division is also the best for mu = its own mean, so it is met where the best one is followed over all mu near the mean,
    which moves little: weighted by the pipelines' speeds, the mean of the times is the same for all divisions.

    Raises ValueError for fewer microbatches than pipelines.
    """
    if num_microbatches < len(pipelines):
        raise ValueError(
            f"{num_microbatches} microbatches cannot be divided among {len(pipelines)} pipelines: each takes one or more"
        )
    opening, pace = _opening_and_pace(pipelines)
    counts = _fastest(opening, pace, num_microbatches)
    return tuple(_most_even(opening, pace, counts).tolist())


def _fastest(opening: Floats, pace: Floats, num_microbatches: int) -> Ints:
    """(R,) microbatches with the least longest time."""
    counts = np.ones(opening.size, np.int64)
    ends = [(float(opening[r] + 2 * pace[r]), r) for r in range(opening.size)]
    heapq.heapify(ends)
    for _ in range(num_microbatches - opening.size):
        _, r = ends[0]
        counts[r] += 1
        heapq.heapreplace(ends, (float(opening[r] + (counts[r] + 1) * pace[r]), r))
    return counts


def _most_even(opening: Floats, pace: Floats, counts: Ints) -> Ints:
    """(R,) microbatches of the least spread whose longest time is no longer than that of `counts`; see `distribute`."""
    noise = 1e-9 * pace.max()  # of rounding, in seconds
    longest = (opening + pace * counts).max() + noise
    gain = pace[None, :] - pace[:, None]  # of seconds in all, by a microbatch moved from one pipeline (row) to another
    counts, even = counts.copy(), counts
    times = opening + pace * counts
    least = np.square(times - times.mean()).sum()
    level = np.average(times, weights=1 / pace)
    mu, end = level - np.sqrt(least), level + np.sqrt(least)
    while True:
        times = opening + pace * counts
        giving = np.where(counts > 1, pace * (pace - 2 * times), np.inf)
        taking = np.where(opening + pace * (counts + 1) <= longest, pace * (pace + 2 * times), np.inf)
        rise = giving[:, None] + taking[None, :]  # of the sum for mu = 0
        if (rise - 2 * mu * gain).min() < -noise * pace.max():
            moved = np.argmin(rise - 2 * mu * gain)
        else:
            spread = np.square(times - times.mean()).sum()
            if spread < least:
                least, even = spread, counts.copy()
            crossings = np.divide(rise, 2 * gain, out=np.full_like(rise, np.inf), where=gain > 0)
            moved = np.argmin(crossings)
            mu = max(mu, crossings.flat[moved])
            if mu > end:
                return even
        source, target = np.unravel_index(moved, rise.shape)
        counts[source] -= 1
        counts[target] += 1


def _split(global_batch: int, microbatch: int, fewest: int) -> int:
    """The number of microbatches of a global batch."""
    num_microbatches, rest = divmod(global_batch, microbatch)
    if rest or num_microbatches < fewest:
        nearest = max(fewest, (2 * global_batch + microbatch) // (2 * microbatch)) * microbatch
        raise UserError(
            f"a global batch of {global_batch} samples cannot be split into microbatches of {microbatch} for {fewest} or more "
            f"pipelines: the nearest that can has {nearest}"
        )
    return num_microbatches


def _opening_and_pace(pipelines: Sequence[Template]) -> tuple[Floats, Floats]:
    """(R,) and (R,): a pipeline takes opening + pace * microbatches seconds. See `iteration_time`, which is linear in them."""
    opening = np.array([pipeline.iteration_s(0) for pipeline in pipelines])
    return opening, np.array([pipeline.iteration_s(1) for pipeline in pipelines]) - opening


@kernel
def _change(sizes: Ints, capacity: Ints, num_nodes: int, fewest: int, most: int, enough: int) -> Ints:
    """Sizes of `fewest` to `most` pipelines that use all nodes and do the most microbatches; empty if that is not `enough`.

    capacity: microbatches of a pipeline of each size; one that does none is not used. O(nodes * sizes * pipelines).
    """
    done = np.full((most + 1, num_nodes + 1), -1, np.int64)
    last = np.zeros((most + 1, num_nodes + 1), np.int64)
    done[0, 0] = 0
    for count in range(1, most + 1):
        for nodes in range(num_nodes + 1):
            for i in range(sizes.size):
                rest = nodes - sizes[i]
                if rest < 0 or capacity[i] == 0 or done[count - 1, rest] < 0:
                    continue
                if done[count - 1, rest] + capacity[i] > done[count, nodes]:
                    done[count, nodes] = done[count - 1, rest] + capacity[i]
                    last[count, nodes] = i
    best = fewest
    for count in range(fewest, most + 1):
        if done[count, num_nodes] > done[best, num_nodes]:
            best = count
    if done[best, num_nodes] < enough:
        return np.empty(0, np.int64)
    chosen = np.empty(best, np.int64)
    nodes = num_nodes
    for count in range(best, 0, -1):
        chosen[count - 1] = sizes[last[count, nodes]]
        nodes -= chosen[count - 1]
    return chosen
