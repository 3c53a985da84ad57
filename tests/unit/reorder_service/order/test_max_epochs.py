"""Sources that give their samples only so often, or more or less than once an epoch, and where the job ends."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from headrace.errors import UserError
from headrace.manifest import UNCOUNTED, ShardTable
from headrace.reorder_service.jobs.batches import GlobalBatches
from headrace.reorder_service.jobs.counted_shards import CountedShards
from headrace.reorder_service.order.global_order import GlobalOrder, SourceShards
from headrace.reorder_service.order.mixture import Mixture
from headrace.spec import parse_spec

Source = tuple[float, int | None]
"""Weight and most samples."""

sources = st.lists(st.tuples(st.floats(0.05, 5), st.one_of(st.none(), st.integers(1, 40))), min_size=1, max_size=5)
some_changes = st.lists(st.tuples(st.integers(0, 150), st.lists(st.floats(0.05, 5), min_size=5, max_size=5)), max_size=3)


def mixture_of(mixed: list[Source], changes: list[tuple[int, list[float]]]) -> Mixture:
    most = {source: limit for source, (_, limit) in enumerate(mixed) if limit is not None}
    changes = sorted((place, weights[: len(mixed)]) for place, weights in changes)
    return Mixture([weight for weight, _ in mixed], changes, most)


def length_of(mixed: list[Source]) -> int:
    """Places of the mixture, of which 300 are looked at if it is endless."""
    limits = [limit for _, limit in mixed if limit is not None]
    return sum(limits) if len(limits) == len(mixed) else 300


@pytest.mark.slow
@given(sources, some_changes)
def test_every_source_gives_its_samples_in_order_until_its_last(mixed: list[Source], changes: Any) -> None:
    mixture, length = mixture_of(mixed, changes), length_of(mixed)
    found = mixture.positions(0, length)
    assert len(found) == length
    for source, (_, most) in enumerate(mixed):
        given_ = [position for giver, position in found if giver == source]
        assert given_ == list(range(len(given_)))
        assert most is None or len(given_) <= most
    for place, (source, position) in enumerate(found):
        assert mixture.place(source, position) == place
    assert_array_equal(mixture.given(length), np.bincount(found[:, 0], minlength=len(mixed)))
    assert mixture.is_endless(0) == (mixed[0][1] is None)


@given(sources, some_changes, st.integers(0, 300))
def test_any_part_is_found_without_what_is_before(mixed: list[Source], changes: Any, start: int) -> None:
    mixture, length = mixture_of(mixed, changes), length_of(mixed)
    start = min(start, length)
    assert_array_equal(mixture.positions(start, length), mixture.positions(0, length)[start:])


@given(sources)
def test_nothing_changes_before_the_first_source_ends(mixed: list[Source]) -> None:
    endless = Mixture([weight for weight, _ in mixed]).positions(0, 400)
    ends = [
        int(np.flatnonzero((endless == (source, most - 1)).all(axis=1))[0])
        for source, (_, most) in enumerate(mixed)
        if most is not None and (endless == (source, most - 1)).all(axis=1).any()
    ]
    stop = min(ends, default=300) + 1
    assert_array_equal(mixture_of(mixed, []).positions(0, min(stop, length_of(mixed))), endless[: min(stop, length_of(mixed))])


def test_the_others_share_what_a_source_leaves() -> None:
    mixture = Mixture([2, 1, 1], (), {0: 10})
    last = mixture.place(0, 9)
    assert last is not None
    assert mixture.shares(last).tolist() == [0.5, 0.25, 0.25]
    assert mixture.shares(last + 1).tolist() == [0, 0.5, 0.5]
    after = Counter(source for source, _ in mixture.positions(last + 1, last + 101))
    assert after == {1: 50, 2: 50}


some_rows = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), min_size=1, max_size=4)


@pytest.mark.slow
@given(some_rows, st.data())
def test_what_was_told_before_a_shard_was_counted_stays(rows: list[list[int]], data: st.DataObject) -> None:
    """Whoever asks in small steps gets the order of whoever has counted all shards before."""
    caps = data.draw(st.lists(st.one_of(st.none(), st.integers(1, 3)), min_size=len(rows), max_size=len(rows)), "max_epochs")
    weights = data.draw(st.lists(st.floats(0.05, 5), min_size=len(rows), max_size=len(rows)), "weights")
    firsts = np.cumsum([0, *map(len, rows)])
    shards = [
        SourceShards(name=f"s{n}", shards=np.arange(firsts[n], firsts[n + 1]), weight=weights[n], max_epochs=caps[n])
        for n in range(len(rows))
    ]
    counts = np.array([count for source in rows for count in source])
    whole = GlobalOrder(shards, counts, seed=1, shuffle_shards=2)
    stop = whole.num_samples(3)
    known = np.full_like(counts, UNCOUNTED)
    growing = GlobalOrder(shards, known, seed=1, shuffle_shards=2)
    told, step = [], data.draw(st.integers(1, 7), "places at a time")
    for start in range(0, stop, step):
        end = min(start + step, stop)
        while missing := growing.to_count(end):
            known[missing] = counts[missing]
        told += growing.refs(start, end)
    assert told == whole.refs(0, stop)


def batches(*sources: dict[str, Any], **spec: Any) -> GlobalBatches:
    """Of sources of ten samples each, in one shard."""
    named = [{"path": f"/{n}", "name": f"s{n}", **source} for n, source in enumerate(sources)]
    job = parse_spec({"name": "j", "sources": named, "global_batch": 4, **spec})
    shards = ShardTable(range(len(named)), [f"/{n}/a" for n in range(len(named))], [f"s{n}/a" for n in range(len(named))])
    made = GlobalBatches(job, CountedShards(job, shards, np.full(len(named), 10)), ())
    made.set_up_order()
    return made


def samples_of(made: GlobalBatches) -> Counter[int]:
    return Counter(ref.shard for step in range(made.num_steps) for ref in made.refs(step))


def test_a_light_and_large_source_no_longer_repeats_a_small_heavy_one() -> None:
    assert samples_of(batches({"weight": 9}, {"weight": 1})) == {0: 86, 1: 10}
    assert samples_of(batches({"weight": 9, "max_epochs": 2}, {"weight": 1})) == {0: 20, 1: 10}


def test_a_job_of_sources_that_all_end_ends_with_the_last_of_them() -> None:
    made = batches({"weight": 9, "max_epochs": 2}, {"weight": 1, "max_epochs": 3}, steps=1000)
    assert (made.num_steps, samples_of(made)) == (13, {0: 20, 1: 30})
    assert batches({"weight": 9, "max_epochs": 2}, {"weight": 1}, steps=1000).num_steps == 1000
    assert batches({"max_epochs": 2}, {"max_epochs": 3}, steps=5).num_steps == 5
    assert batches({"max_epochs": 2}, epochs=5).num_steps == 5


def test_shares_tell_which_sources_have_ended() -> None:
    made = batches({"weight": 9, "max_epochs": 1}, {"weight": 1}, steps=100)
    assert made.shares(0) == [0.9, 0.1]
    assert made.shares(50) == [0, 1]


def test_weights_must_leave_a_source_that_goes_on() -> None:
    made = batches({"weight": 9, "max_epochs": 1}, {"weight": 1}, steps=100)
    with pytest.raises(UserError, match="weights leave only sources that end by their max_epochs: give one of s1 a weight"):
        made.changed(3, {"s0": 1.0, "s1": 0.0})
    assert made.changed(3, {"s0": 0.0, "s1": 2.0}) == ((3, (0.0, 2.0)),)


@pytest.mark.parametrize(
    ("repetitions", "epochs", "expected"),
    [((2, None), 1, {0: 20, 1: 10}), ((0.5, 1), 2, {0: 10, 1: 20}), ((0.3, 1.7), 10, {0: 30, 1: 170}), ((0.001,), 1, {0: 1})],
)
def test_an_epoch_has_a_source_as_often_as_its_repetitions_say(
    repetitions: tuple[float | None, ...], epochs: int, expected: dict[int, int]
) -> None:
    assert samples_of(batches(*({"repetitions": times} for times in repetitions), epochs=epochs)) == expected


def test_no_sample_is_there_twice_before_all_are_there_once() -> None:
    made = batches({"repetitions": 1.7}, {"repetitions": 0.7})
    rows = Counter((ref.shard, ref.row) for step in range(made.num_steps) for ref in made.refs(step))
    assert [max(count for (shard, _), count in rows.items() if shard == source) for source in (0, 1)] == [2, 1]
    assert len(rows) == 17


def test_max_epochs_count_what_a_source_gives_and_not_the_epochs_of_the_job() -> None:
    assert samples_of(batches({"repetitions": 2, "max_epochs": 3}, {"repetitions": 1}, epochs=4)) == {0: 30, 1: 40}
    assert samples_of(batches({"repetitions": 0.5, "max_epochs": 2}, steps=100)) == {0: 20}


def test_a_source_has_a_weight_or_repetitions() -> None:
    with pytest.raises(UserError, match="weight and repetitions both say how much of the mixture the source is"):
        batches({"weight": 1, "repetitions": 2})
