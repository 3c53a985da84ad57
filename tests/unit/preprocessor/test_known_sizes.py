"""Sizes are kept from probing to decoding: once, the latest, and within a budget."""

from __future__ import annotations

import numpy as np

from headrace.sample import SampleRef
from preprocessor.known_sizes import KnownSizes
from preprocessor.pipeline import Sizes
from preprocessor.template import Sequence


def ref(row: int, sample_id: int = 0) -> SampleRef:
    return SampleRef(sample_id=sample_id, shard=3, row=row)


def sizes(num_tokens: int) -> Sizes:
    ids = np.zeros(num_tokens, np.int32)
    return Sizes(sequence=Sequence(input_ids=ids, labels=ids), grids=(), mel_frames=())


def test_sizes_are_given_once() -> None:
    known, first = KnownSizes(), sizes(5)
    known.put(ref(0), first)
    assert known.take(ref(0)) is first
    assert known.take(ref(0)) is None


def test_a_sample_is_known_by_its_place_whatever_its_number_in_the_epoch() -> None:
    known, first = KnownSizes(), sizes(5)
    known.put(ref(0, sample_id=7), first)
    assert known.take(ref(1, sample_id=7)) is None
    assert known.take(ref(0, sample_id=8)) is first


def test_the_oldest_make_room() -> None:
    known = KnownSizes(budget_bytes=3 * (8 * 1000 + 1024))
    for row in range(4):
        known.put(ref(row), sizes(1000))
    assert [known.take(ref(row)) is not None for row in range(4)] == [False, True, True, True]


def test_what_is_put_again_counts_once() -> None:
    known = KnownSizes(budget_bytes=2 * (8 * 1000 + 1024))
    for _ in range(5):
        known.put(ref(0), sizes(1000))
    known.put(ref(1), sizes(1000))
    assert known.take(ref(0)) is not None
    assert known.take(ref(1)) is not None


def test_what_has_no_room_at_all_is_not_kept() -> None:
    known = KnownSizes(budget_bytes=1000)
    known.put(ref(0), sizes(10_000))
    assert known.take(ref(0)) is None
