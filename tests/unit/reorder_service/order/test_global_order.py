"""The global order: a pure function of manifest, weights, seed and epoch (design section 3, invariant 1)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reorder_service.order.global_order import GlobalOrder, Int64, SourceShards, permutation
from headrace.sample import SampleRef
from tests.examples import with_examples

Rows = list[list[int]]


def make_order(rows: Rows, weights: list[float] | None = None, **settings: Any) -> GlobalOrder:
    """Sources whose shards hold the given numbers of rows; the manifest lists them one after another."""
    return growing_order(rows, np.array([count for counts in rows for count in counts]), weights, **settings)


def growing_order(
    rows: Rows, num_rows: Int64, weights: list[float] | None = None, seed: int = 0, shuffle_shards: int = 4, **settings: Any
) -> GlobalOrder:
    """The same of shards whose rows are in `num_rows`, as far as they are counted."""
    sources, first = [], 0
    for n, counts in enumerate(rows):
        shards = np.arange(first, first + len(counts))
        sources.append(SourceShards(name=f"source-{n}", shards=shards, weight=weights[n] if weights else None))
        first += len(counts)
    return GlobalOrder(sources, num_rows, seed=seed, shuffle_shards=shuffle_shards, **settings)


def places(refs: list[SampleRef]) -> list[tuple[int, int]]:
    return [(ref.shard, ref.row) for ref in refs]


def source_of(rows: Rows) -> dict[int, int]:
    shards = [n for n, counts in enumerate(rows) for _ in counts]
    return dict(enumerate(shards))


some_rows = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), min_size=1, max_size=4)
some_order = st.tuples(some_rows, st.integers(0, 2**63 - 1), st.integers(1, 7), st.booleans(), st.integers(0, 10**6))


@given(st.integers(0, 300), st.integers(0, 2**64 - 1))
def test_permutation_is_one_and_depends_on_its_key_alone(n: int, key: int) -> None:
    first = permutation(n, key)
    assert sorted(first.tolist()) == list(range(n))
    assert (permutation(n, key) == first).all()


def test_permutations_of_different_keys_differ_and_every_place_is_likely() -> None:
    tops = Counter(int(permutation(5, key)[0]) for key in range(2000))
    assert len({tuple(permutation(50, key)) for key in range(100)}) == 100
    assert all(300 < tops[i] < 500 for i in range(5))


@given(some_rows, st.integers(0, 2**63 - 1), st.integers(1, 7))
def test_every_epoch_has_every_sample_once(rows: Rows, seed: int, shuffle_shards: int) -> None:
    order = make_order(rows, seed=seed, shuffle_shards=shuffle_shards)
    size = order.num_samples(1)
    everything = {(shard, row) for shard, n in enumerate(n for counts in rows for n in counts) for row in range(n)}
    for epoch in range(2):
        refs = order.refs(epoch * size, (epoch + 1) * size)
        assert len(refs) == len(everything)
        assert set(places(refs)) == everything
        assert [ref.sample_id for ref in refs] == list(range(epoch * size, (epoch + 1) * size))
    assert order.num_samples(2) == 2 * size


@with_examples(40)
@given(some_rows, st.data())
def test_with_weights_every_sample_is_had_by_the_end_of_the_epoch_and_not_before(rows: Rows, data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(0.2, 5), min_size=len(rows), max_size=len(rows)))
    epochs = data.draw(st.integers(1, 2))
    order = make_order(rows, weights)
    had = Counter(places(order.refs(0, order.num_samples(epochs))))
    assert all(had[shard, row] >= epochs for shard, n in enumerate(n for c in rows for n in c) for row in range(n))
    less = Counter(places(order.refs(0, order.num_samples(epochs) - 1)))
    assert not all(less[place] >= epochs for place in had)


def test_an_epoch_with_one_heavy_source_and_many_light_ones_is_whole() -> None:
    order = make_order([[149], *([[1]] * 9)], [91.0, *([1.0] * 9)])
    assert {shard for shard, _ in places(order.refs(0, order.num_samples(1)))} == set(range(10))
    assert len({row for shard, row in places(order.refs(0, order.num_samples(1))) if shard == 0}) == 149


@given(some_order, st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_random_access_equals_walking_whatever_the_batches(case: tuple, cuts: list[int]) -> None:
    rows, seed, shuffle_shards, weighted, start = case
    weights = [1.0 + n for n in range(len(rows))] if weighted else None
    whole = make_order(rows, weights, seed=seed, shuffle_shards=shuffle_shards).refs(start, start + sum(cuts))
    order, pieces, place = make_order(rows, weights, seed=seed, shuffle_shards=shuffle_shards), [], start
    for cut in cuts:
        pieces += order.refs(place, place + cut)
        place += cut
    assert pieces == whole
    backwards = [order.refs(place, place + 1)[0] for place in reversed(range(start, start + sum(cuts)))]
    assert backwards == whole[::-1]


@given(some_rows, st.data())
def test_a_source_keeps_its_share_at_every_prefix(rows: Rows, data: st.DataObject) -> None:
    weights = data.draw(st.none() | st.lists(st.floats(0.05, 20), min_size=len(rows), max_size=len(rows)))
    order = make_order(rows, weights)
    raw = np.array(weights or [sum(counts) for counts in rows], dtype=np.float64)
    shares, owner = raw / raw.sum(), source_of(rows)
    given_so_far = np.zeros(len(rows))
    for g, (shard, _) in enumerate(places(order.refs(0, 200)), 1):
        given_so_far[owner[shard]] += 1
        bound = 0.5 + np.maximum(0, len(rows) - 2) * shares / 2
        assert (abs(given_so_far - shares * g) <= bound + 1e-6).all()


def test_the_shuffle_stays_within_a_block_of_shards_and_shards_are_shuffled_too() -> None:
    order = make_order([[10] * 12], shuffle_shards=3)
    shards = [shard for shard, _ in places(order.refs(0, 120))]
    blocks = [set(shards[start : start + 30]) for start in range(0, 120, 30)]
    assert all(len(block) == 3 for block in blocks)
    assert blocks != [{0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {9, 10, 11}]
    rows = [row for _, row in places(order.refs(0, 30))]
    assert rows != sorted(rows)


@given(some_rows, st.integers(0, 2**40), st.integers(1, 9), st.integers(1, 5))
def test_rows_that_stay_together_follow_one_another(rows: Rows, seed: int, shuffle_rows: int, shuffle_shards: int) -> None:
    source = [[*counts] for counts in rows[:1]]
    order = make_order(source, seed=seed, shuffle_shards=shuffle_shards, shuffle_rows=shuffle_rows)
    for epoch in range(2):
        size = order.num_samples(1)
        found = places(order.refs(epoch * size, (epoch + 1) * size))
        assert sorted(found) == [(shard, row) for shard, count in enumerate(source[0]) for row in range(count)]
        for (shard, row), before in zip(found[1:], found, strict=False):
            assert row % shuffle_rows == 0 or before == (shard, row - 1)


def test_runs_of_rows_are_shuffled_over_the_shards_of_a_block() -> None:
    order = make_order([[20] * 4], shuffle_shards=4, shuffle_rows=5)
    runs = places(order.refs(0, 80))[::5]
    assert runs != sorted(runs)
    assert len({shard for shard, _ in runs[:4]}) > 1


@given(some_rows, st.integers(1, 7), st.integers(0, 100))
def test_without_shuffling_every_epoch_is_in_the_order_of_the_manifest(rows: Rows, shuffle_shards: int, start: int) -> None:
    order = make_order(rows, shuffle_shards=shuffle_shards, shuffle=False)
    owner = source_of(rows)
    by_source: dict[int, list[tuple[int, int]]] = {}
    for shard, n in enumerate(n for counts in rows for n in counts):
        by_source.setdefault(owner[shard], []).extend((shard, row) for row in range(n))
    for epoch in range(2):
        found = places(order.refs(epoch * order.num_samples(1), (epoch + 1) * order.num_samples(1)))
        assert {source: [place for place in found if owner[place[0]] == source] for source in by_source} == by_source
    assert places(order.refs(start, start + 1))[0] == places(order.refs(0, start + 1))[-1]


def test_seeds_and_epochs_give_different_orders() -> None:
    one, other = make_order([[20, 20]], seed=1), make_order([[20, 20]], seed=2)
    assert places(one.refs(0, 40)) != places(other.refs(0, 40))
    assert places(one.refs(0, 40)) != places(one.refs(40, 80))


def test_a_source_without_samples_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="source-1"):
        make_order([[3], [0, 0]])


def test_golden_order() -> None:
    """Jobs resume by place. A change of these values breaks every job that is under way."""
    assert permutation(10, 7).tolist() == [1, 8, 5, 7, 0, 9, 4, 6, 3, 2]
    assert places(make_order([[3, 0, 4], [2]], seed=5, shuffle_shards=2).refs(0, 12)) == [
        (2, 3),
        (2, 2),
        (3, 1),
        (2, 1),
        (2, 0),
        (0, 1),
        (3, 0),
        (0, 2),
        (0, 0),
        (2, 2),
        (2, 1),
        (3, 1),
    ]
    assert places(make_order([[3, 4], [2]], [1.0, 3.0], seed=5).refs(1000, 1008)) == [
        (2, 1),
        (1, 0),
        (2, 0),
        (2, 0),
        (2, 1),
        (1, 1),
        (2, 1),
        (2, 0),
    ]
