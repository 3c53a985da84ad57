"""Form pipelines from the available nodes, and divide the microbatches among them (Oobleck, dissertation section 2.4.2).

A step takes as long as its slowest pipeline, so both choices minimise the longest time of a pipeline. Among divisions that are
equally fast, the one whose times spread least is taken (equation 2.6).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.errors import UserError
from headrace.jit import kernel
from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.recovery.pipeline_templates import Template, Templates


@dataclass(frozen=True, slots=True, kw_only=True)
class Instantiation:
    """A set of pipelines that uses all nodes, and the microbatches of each pipeline."""

    templates: tuple[Template, ...]
    """Template of each pipeline, the largest first."""
    microbatches: tuple[int, ...]
    """Number of microbatches of each pipeline."""
    iteration_time: float
    """Predicted seconds of a step."""


def instantiate(templates: Templates, num_nodes: int, global_batch: int, microbatch: int) -> Instantiation:
    """Return the fastest set of pipelines that uses all `num_nodes` nodes and outnumbers the failures to survive.

    Whether a step can take theta seconds is a coin change problem: among pipelines whose nodes add up to all nodes, find those
    that do the most microbatches in that time. The least theta in which they do enough is found by bisection over the times that
    a pipeline can take.

    global_batch, microbatch: numbers of samples. Raises UserError if nodes or the global batch cannot be divided; for the global
    batch, the message names the nearest one that can.
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
        iteration_time=max(template.iteration_time(count) for template, count in zip(chosen, microbatches, strict=True)),
    )


def distribute(pipelines: Sequence[Template], num_microbatches: int) -> tuple[int, ...]:
    """Return how many microbatches each pipeline takes, at least one, for the shortest step and then the least spread of times.

    The spread is the sum of the times' squared distances from their mean.

    The shortest step: each further microbatch goes to the pipeline that would finish it first. The least spread: with a fixed mu
    in place of the mean, the sum is separable and convex, so it is least where moving no single microbatch lowers it. The best
    division is also the best for mu = its own mean, so it is met when the best division is followed over all mu near the mean.
    The mean moves little: weighted by the pipelines' speeds, it is the same for all divisions.

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
    """Return (R,) the microbatches of each pipeline for which the longest time is least."""
    counts = np.ones(opening.size, np.int64)
    ends = [(float(opening[r] + 2 * pace[r]), r) for r in range(opening.size)]
    heapq.heapify(ends)
    for _ in range(num_microbatches - opening.size):
        _, r = ends[0]
        counts[r] += 1
        heapq.heapreplace(ends, (float(opening[r] + (counts[r] + 1) * pace[r]), r))
    return counts


def _most_even(opening: Floats, pace: Floats, counts: Ints) -> Ints:
    """Return (R,) the microbatches of least spread whose longest time is no longer than that of `counts`; see `distribute`."""
    noise = 1e-9 * pace.max()  # rounding errors, in seconds
    longest = (opening + pace * counts).max() + noise
    gain = pace[None, :] - pace[:, None]  # change of the summed times, in seconds, by a microbatch moved from row to column
    counts, even = counts.copy(), counts
    times = opening + pace * counts
    least = np.square(times - times.mean()).sum()
    level = np.average(times, weights=1 / pace)
    mu, end = level - np.sqrt(least), level + np.sqrt(least)
    while True:
        times = opening + pace * counts
        giving = np.where(counts > 1, pace * (pace - 2 * times), np.inf)
        taking = np.where(opening + pace * (counts + 1) <= longest, pace * (pace + 2 * times), np.inf)
        rise = giving[:, None] + taking[None, :]  # of the sum of squares for mu = 0
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
    """Return the number of microbatches in a global batch. Raises UserError if it cannot be split into `fewest` or more."""
    num_microbatches, rest = divmod(global_batch, microbatch)
    if rest or num_microbatches < fewest:
        nearest = max(fewest, (2 * global_batch + microbatch) // (2 * microbatch)) * microbatch
        raise UserError(
            f"a global batch of {global_batch} samples cannot be split into microbatches of {microbatch} for {fewest} or more "
            f"pipelines: the nearest that can has {nearest}"
        )
    return num_microbatches


def _opening_and_pace(pipelines: Sequence[Template]) -> tuple[Floats, Floats]:
    """(R,) opening and (R,) pace: n microbatches take a pipeline opening + pace * n seconds, for `iteration_time` is linear."""
    opening = np.array([pipeline.iteration_time(0) for pipeline in pipelines])
    return opening, np.array([pipeline.iteration_time(1) for pipeline in pipelines]) - opening


@kernel
def _change(sizes: Ints, capacity: Ints, num_nodes: int, fewest: int, most: int, enough: int) -> Ints:
    """Sizes of the `fewest` to `most` pipelines that use all nodes and do the most microbatches; empty if not `enough`.

    capacity: how many microbatches a pipeline of each size does; sizes with 0 are not used. O(nodes * sizes * pipelines).
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
