"""Which samples of a data set a survey looks at: all of them, or so many that are spread over it.

Local shards are indexed, and the samples are spread evenly over all of their rows. Of remote shards, whose index would take most
of their bytes, a few are chosen that lie far apart, and of each the first samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from headrace.quarantine import Rejected
from headrace.sample import SampleRef

FEW_SHARDS, MANY_SHARDS = 4, 128
"""Least and most remote shards that samples are taken of, where these have enough; and at least one of each source."""
MANY_SAMPLES = 64
"""Samples of one remote shard beyond which they are rather taken of more shards."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choice:
    """The n samples that are looked at, in the order of the shards and of their rows."""

    shards: NDArray[np.int64]
    """Number of each sample's shard, (n,)."""
    rows: NDArray[np.int64]
    """Row of each sample in its shard, (n,)."""
    damage: tuple[Rejected, ...]
    """What is wrong with the shards that were indexed."""
    num_shards: int
    """Number of shards that were indexed."""
    num_left: int | None
    """Number of samples that are not looked at; None where it is not known."""

    def refs(self, begin: int, end: int) -> list[SampleRef]:
        """Return the samples from `begin` up to `end`, or to the last one; their ids are their places in the choice."""
        places = range(begin, min(end, len(self.shards)))
        return [SampleRef(sample_id=n, shard=int(self.shards[n]), row=int(self.rows[n])) for n in places]

    def thinned(self, limit: int) -> list[SampleRef]:
        """Return at most `limit` of the samples, evenly spread."""
        _, places = evenly_spaced_samples([len(self.shards)], limit)
        return [ref for place in places.tolist() for ref in self.refs(place, place + 1)]


def evenly_spaced_samples(rows: Sequence[int], limit: int | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Choose at most `limit` samples that are equally far apart in the sequence of all rows of all shards.

    rows: number of samples in each shard. Returns the samples' shards and rows, two arrays (n,), n = min(limit, sum(rows)).
    """
    total = sum(rows)
    count = total if limit is None else min(limit, total)
    if not count:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    starts = np.cumsum([0, *rows], dtype=np.int64)
    places = (np.arange(count, dtype=np.int64) * total + total // 2) // count
    shards = np.searchsorted(starts, places, side="right") - 1
    return shards, places - starts[shards]


def choose_evenly(rows: Sequence[int], damage: Sequence[Rejected], limit: int | None) -> Choice:
    """Choose at most `limit` samples of indexed shards. `rows`: number of samples in each shard."""
    shards, places = evenly_spaced_samples(rows, limit)
    return Choice(shards=shards, rows=places, damage=tuple(damage), num_shards=len(rows), num_left=sum(rows) - len(shards))


def choose_beginnings(sources: Sequence[int], limit: int, count: Callable[[int, int], tuple[int, Sequence[Rejected]]]) -> Choice:
    """Choose `limit` samples, or as many as there are, from the beginnings of few shards.

    sources: the source of each shard. `count(shard, wanted)` returns how many samples the shard has, which is only exact if
    there are fewer than `wanted`, and the damage in it.
    """
    order = _shards_of_sources_in_turn(sources)
    few = min(len(order), max(FEW_SHARDS, len(set(sources)), min(MANY_SHARDS, -(-limit // MANY_SAMPLES))))
    taken = dict.fromkeys(order, 0)
    damage: dict[int, Sequence[Rejected]] = {}
    left = limit
    for turn, shard in enumerate([*order, *order]):
        if not left:
            break
        wanted = taken[shard] + (-(-left // (few - turn)) if turn < few else left)
        rows, damage[shard] = count(shard, wanted)
        left -= max(0, min(rows, wanted) - taken[shard])
        taken[shard] = max(taken[shard], min(rows, wanted))
    shards = sorted(shard for shard, rows in taken.items() if rows)
    return Choice(
        shards=np.repeat(np.array(shards, np.int64), [taken[shard] for shard in shards]),
        rows=np.concatenate([np.empty(0, np.int64), *(np.arange(taken[shard]) for shard in shards)]),
        damage=tuple(item for shard in sorted(damage) for item in damage[shard]),
        num_shards=len(damage),
        num_left=None,
    )


def _shards_of_sources_in_turn(sources: Sequence[int]) -> list[int]:
    """Return the numbers of all shards in an order of which every beginning is spread over the sources, and over their shards."""
    of_source: dict[int, list[int]] = {}
    for shard, source in enumerate(sources):
        of_source.setdefault(source, []).append(shard)
    orders = [[shards[place] for place in spread_order(len(shards))] for shards in of_source.values()]
    return [shard for turn in zip_longest(*orders) for shard in turn if shard is not None]


def spread_order(count: int) -> list[int]:
    """Return the numbers from 0 to `count` - 1 in an order of which every beginning is spread: of 8 it is 0 4 2 6 1 5 3 7."""
    bits = max(0, count - 1).bit_length()
    fractions = (int(f"{number:0{bits}b}"[::-1], 2) / (1 << bits) for number in range(1 << bits)) if bits else (0.0,)
    return list(dict.fromkeys(int(fraction * count) for fraction in fractions))[:count]
