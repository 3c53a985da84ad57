"""Packs of a microbatch: offsets that fit the samples, padding that changes nothing, and samples that did not arrive."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import HeadraceError
from headrace.manifest import Vocabulary
from headrace.sample import LABEL_IGNORED, SCHEMA, UNIT_COLUMNS
from headrace.spec import parse_spec
from headrace.trainer.loading.collate import PackedMicrobatch, collate
from headrace.trainer.loading.packs import Padding, in_packs

PADDING = Padding(pack_tokens=12, segment_tokens=5, token=0)


def collated(lengths: dict[int, int], columns: tuple[str, ...] = UNIT_COLUMNS["llm"]) -> PackedMicrobatch:
    """Samples of so many tokens, by sample id; no two tokens of a microbatch are alike, and none is the token of padding."""
    starts = np.cumsum([1, *lengths.values()])
    rows: list[dict[str, Any]] = [
        {
            "sample_id": sample,
            "input_ids": list(range(start, start + length)),
            "labels": list(range(start, start + length)),
            "patches": [],
            "image_grids": [],
            "mel": [],
            "mel_frames": [],
            "flags": 0,
        }
        for (sample, length), start in zip(lengths.items(), starts, strict=False)
    ]
    return collate([pa.RecordBatch.from_pylist(rows, schema=SCHEMA).select(list(columns))])


def tokens_of(data: PackedMicrobatch) -> dict[int, list[int]]:
    """The token ids of each sample, found by its segment."""
    bounds = data.cu_seqlens.tolist()
    segments = data.sample_segments.tolist()
    return {
        sample: data.input_ids[bounds[segment] : bounds[segment + 1]].tolist()
        for sample, segment in zip(data.sample_ids.tolist(), segments, strict=True)
    }


@st.composite
def microbatches(draw: st.DrawFn) -> tuple[dict[int, int], list[list[int]]]:
    """(tokens of the samples that arrived, by sample id; the packs as they were planned, of at most 12 tokens each)."""
    packs: list[list[int]] = []
    arrived: dict[int, int] = {}
    number = 0
    for _ in range(draw(st.integers(0, 5))):
        pack, room = [], 12
        while room and (not pack or draw(st.booleans())):
            length = draw(st.integers(1, room))
            room -= length
            if draw(st.integers(0, 3)):
                arrived[number] = length
            pack.append(number)
            number += 1
        packs.append(pack)
    return arrived, packs


def surviving(arrived: dict[int, int], packs: list[list[int]]) -> list[list[int]]:
    return [kept for pack in packs if (kept := [sample for sample in pack if sample in arrived])]


@given(microbatches())
def test_offsets_of_packs_are_sums_of_the_lengths_of_their_samples(drawn: tuple[dict[int, int], list[list[int]]]) -> None:
    arrived, packs = drawn
    data = in_packs(collated(arrived), packs)
    lengths = [sum(arrived[sample] for sample in pack) for pack in surviving(arrived, packs)]
    assert data.pack_offsets.tolist() == np.cumsum([0, *lengths]).tolist()
    assert data.pack_offsets.dtype == torch.int32
    assert set(data.pack_offsets.tolist()) <= set(data.cu_seqlens.tolist()), "a pack is whole segments"


@given(microbatches())
def test_every_padded_pack_is_its_samples_in_order_and_then_padding_up_to_its_length(
    drawn: tuple[dict[int, int], list[list[int]]],
) -> None:
    arrived, packs = drawn
    plain = collated(arrived)
    data = in_packs(plain, packs, PADDING)
    kept = surviving(arrived, packs)
    assert data.sample_ids.tolist() == list(arrived)
    assert data.pack_offsets.tolist() == [12 * number for number in range(len(kept) + 1)]
    for pack, (start, end) in zip(kept, pairwise(data.pack_offsets.tolist()), strict=True):
        expected = [token for sample in pack for token in tokens_of(plain)[sample]]
        assert data.input_ids[start:end].tolist() == expected + [PADDING.token] * (12 - len(expected))
        assert (data.labels[start + len(expected) : end] == LABEL_IGNORED).all()


@given(microbatches())
def test_samples_keep_their_tokens_labels_and_positions_and_padding_has_segments_of_its_own(
    drawn: tuple[dict[int, int], list[list[int]]],
) -> None:
    arrived, packs = drawn
    plain, data = collated(arrived), in_packs(collated(arrived), packs, PADDING)
    assert tokens_of(data) == tokens_of(plain)
    assert data.labels[data.labels != LABEL_IGNORED].tolist() == plain.labels[plain.labels != LABEL_IGNORED].tolist()
    assert data.num_targets == plain.num_targets == int((data.labels != LABEL_IGNORED).sum())
    bounds = data.cu_seqlens.tolist()
    assert all(start < end for start, end in pairwise(bounds))
    assert data.position_ids.tolist() == [position for start, end in pairwise(bounds) for position in range(end - start)]
    of_padding = sorted(set(range(len(bounds) - 1)) - set(data.sample_segments.tolist()))
    assert all(bounds[number + 1] - bounds[number] <= PADDING.segment_tokens for number in of_padding)
    assert all((data.input_ids[bounds[number] : bounds[number + 1]] == PADDING.token).all() for number in of_padding)


@given(microbatches())
def test_tensors_keep_their_kinds(drawn: tuple[dict[int, int], list[list[int]]]) -> None:
    arrived, packs = drawn
    plain, data = collated(arrived), in_packs(collated(arrived), packs, PADDING)
    for name in PackedMicrobatch.__slots__:
        if isinstance(one := getattr(plain, name), torch.Tensor):
            assert one.dtype == getattr(data, name).dtype, name


def test_a_pack_that_is_full_gets_no_padding() -> None:
    data = in_packs(collated({1: 8, 2: 4}), [[1, 2]], PADDING)
    assert data.cu_seqlens.tolist() == [0, 8, 12]
    assert data.sample_segments.tolist() == [0, 1]


def test_padding_longer_than_a_segment_may_be_is_several() -> None:
    data = in_packs(collated({1: 1, 2: 8}), [[1], [2]], PADDING)
    assert data.cu_seqlens.tolist() == [0, 1, 6, 11, 12, 20, 24]
    assert data.sample_segments.tolist() == [0, 4]


def test_a_microbatch_without_samples_stays_empty() -> None:
    for packs in ([], [[3, 4]]):
        data = in_packs(collate([]), packs, PADDING)
        assert data.pack_offsets.tolist() == data.cu_seqlens.tolist() == [0]
        assert len(data.input_ids) == len(data.sample_ids) == 0


@pytest.mark.parametrize("unit", ["vision", "audio", "encoder", "generator"])
def test_units_without_tokens_get_no_padding(unit: str) -> None:
    data = in_packs(collated({1: 3, 2: 4}, UNIT_COLUMNS[unit]), [[1], [2]], PADDING)
    assert (len(data.input_ids), data.cu_seqlens.tolist(), data.pack_offsets.tolist()) == (0, [0, 0, 0], [0, 0, 0])


def test_without_packs_each_sample_is_one() -> None:
    assert collated({1: 3, 2: 4}).pack_offsets.tolist() == [0, 3, 7]


def test_a_pack_that_is_longer_than_planned_is_refused() -> None:
    with pytest.raises(HeadraceError, match="a pack arrived with 13 tokens, but was planned for at most 12"):
        in_packs(collated({1: 3, 2: 8, 3: 5}), [[1], [2, 3]], PADDING)


def test_a_job_pads_with_a_token_that_stands_for_no_media() -> None:
    document = {"name": "job", "sources": [{"path": "/d"}], "pack_tokens": 64, "text": {"max_tokens": 16}}
    vocabulary = Vocabulary(size=9, image_token=0, audio_token=1)
    padding = Padding.of(parse_spec({**document, "pad_to_max_length": True}), vocabulary)
    assert padding == Padding(pack_tokens=64, segment_tokens=16, token=2)
    assert Padding.of(parse_spec(document), vocabulary) is None
