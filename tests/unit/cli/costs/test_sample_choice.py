"""Which samples are looked at: evenly spread ones of indexed shards, the first ones of a few remote shards."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.cli.costs.sample_choice import choose_beginnings, choose_evenly, evenly_spaced_samples, spread_order
from headrace.quarantine import Reason, Rejected

ROWS = st.lists(st.integers(0, 40), min_size=1, max_size=12)


def rows_by_shard(rows: list[int], limit: int, sources: list[int] | None = None) -> dict[int, int]:
    """How many samples are taken of each shard that is read."""
    asked: dict[int, int] = {}

    def count(shard: int, wanted: int) -> tuple[int, list[Rejected]]:
        asked[shard] = max(wanted, asked.get(shard, 0))
        return rows[shard], []

    choice = choose_beginnings(sources or [0] * len(rows), limit, count)
    assert choice.num_shards == len(asked)
    taken = {shard: int((choice.shards == shard).sum()) for shard in asked}
    assert all(taken[shard] <= asked[shard] for shard in asked), "what is taken was asked for"
    return taken


@given(rows=st.lists(st.integers(0, 40), max_size=12), limit=st.one_of(st.none(), st.integers(1, 500)))
def test_samples_are_spread_evenly(rows: list[int], limit: int | None) -> None:
    shards, places = evenly_spaced_samples(rows, limit)
    total = sum(rows)
    assert len(shards) == len(places) == (total if limit is None else min(limit, total))
    assert all(0 <= place < rows[shard] for shard, place in zip(shards, places, strict=True))
    order = np.cumsum([0, *rows])[shards] + places
    gaps = np.diff(order)
    assert (gaps > 0).all(), "each sample once, in order"
    assert not len(gaps) or gaps.max() - gaps.min() <= 1


def test_a_choice_gives_its_samples_in_pieces_and_thinned() -> None:
    damage = [Rejected(name="x", reason=Reason.ARCHIVE_CORRUPT, detail="")]
    choice = choose_evenly([3, 0, 5], damage, 4)
    assert [(ref.sample_id, ref.shard, ref.row) for ref in choice.refs(1, 9)] == [(1, 2, 0), (2, 2, 2), (3, 2, 4)]
    assert [(ref.sample_id, ref.shard) for ref in choice.thinned(2)] == [(1, 2), (3, 2)]
    assert (choice.num_left, choice.num_shards, choice.damage) == (4, 3, tuple(damage))


@given(count=st.integers(1, 300))
def test_every_beginning_of_the_order_is_spread(count: int) -> None:
    order = spread_order(count)
    assert sorted(order) == list(range(count))
    four = sorted(order[:4])
    assert all(b - a >= count // 4 for a, b in pairwise(four))


def test_a_limit_takes_equal_parts_of_four_remote_shards_that_lie_far_apart() -> None:
    assert rows_by_shard([200] * 64, 20) == {0: 5, 16: 5, 32: 5, 48: 5}


def test_many_samples_are_of_more_shards() -> None:
    assert set(rows_by_shard([200] * 64, 4096).values()) == {64}
    assert set(rows_by_shard([200] * 1000, 512).values()) == {64}


def test_every_source_is_looked_at() -> None:
    assert rows_by_shard([200] * 8, 12, sources=[0, 0, 1, 2, 3, 4, 5, 5]) == {0: 2, 2: 2, 3: 2, 4: 2, 5: 2, 6: 2}


@given(rows=ROWS, limit=st.integers(1, 500))
def test_as_many_samples_as_wanted_or_as_there_are(rows: list[int], limit: int) -> None:
    taken = rows_by_shard(rows, limit)
    assert sum(taken.values()) == min(limit, sum(rows))
    assert all(number <= rows[shard] for shard, number in taken.items())
