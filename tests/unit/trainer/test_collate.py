"""Packing: what the tensors hold, what is shared with Arrow, what is refused."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import HeadraceError
from headrace.sample import LABEL_IGNORED, SCHEMA
from trainer.collate import collate


def test_labels_lie_where_they_are_predicted(make_row, make_batch):
    rows = [make_row(1), make_row(2)]
    rows[0] |= {"input_ids": [7, 8, 9], "labels": [-100, 8, 9]}
    rows[1] |= {"input_ids": [5, 6], "labels": [5, 6]}
    packed = collate([make_batch(rows)])
    assert packed.input_ids.tolist() == [7, 8, 9, 5, 6]
    assert packed.labels.tolist() == [8, 9, -100, 6, -100]
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert packed.cu_seqlens.tolist() == [0, 3, 5]


def test_a_first_token_with_loss_is_not_counted_as_target(make_row, make_batch):
    row = make_row(1) | {"input_ids": [5, 6, 7], "labels": [5, 6, 7]}
    assert collate([make_batch([row])]).num_targets == 2


def test_a_mixed_batch_keeps_every_value_in_order(mixed_rows, make_batch):
    packed = collate([make_batch(mixed_rows)])
    assert packed.sample_ids.tolist() == [row["sample_id"] for row in mixed_rows]
    assert packed.image_grids.tolist() == [[1, 4, 6], [1, 2, 2], [1, 2, 2], [1, 6, 4], [1, 4, 4]]
    assert packed.image_cu_seqlens.tolist() == [0, 24, 28, 32, 56, 72]
    assert packed.mel_frames.tolist() == [13, 8, 1, 21]
    assert packed.mel_cu_seqlens.tolist() == [0, 13, 21, 22, 43]
    np.testing.assert_array_equal(packed.patches.numpy().ravel(), np.concatenate([row["patches"] for row in mixed_rows]))
    np.testing.assert_array_equal(packed.mel.numpy().ravel(), np.concatenate([row["mel"] for row in mixed_rows]))
    assert packed.patches.shape == (72, 12)
    assert packed.mel.shape == (43, 4)
    assert packed.num_targets == sum(int((row["labels"] != LABEL_IGNORED).sum()) for row in mixed_rows)


def test_dtypes_are_those_of_the_contract(mixed_rows, make_batch):
    for packed in (collate([make_batch(mixed_rows)]), collate([])):
        assert (
            packed.sample_ids.dtype == packed.input_ids.dtype == packed.labels.dtype == packed.position_ids.dtype == torch.int64
        )
        assert packed.cu_seqlens.dtype == packed.image_cu_seqlens.dtype == packed.mel_cu_seqlens.dtype == torch.int32
        assert packed.image_grids.dtype == packed.mel_frames.dtype == torch.int32
        assert (packed.patches.dtype, packed.mel.dtype) == (torch.uint8, torch.float16)


@given(cuts=st.lists(st.integers(0, 6), max_size=4))
def test_parts_in_order_equal_one_batch(cuts, mixed_rows_once):
    """Any cutting into slices, empty ones included, packs to the same tensors."""
    whole = mixed_rows_once
    edges = [0, *sorted(cuts), whole.num_rows]
    parts = [whole.slice(start, end - start) for start, end in pairwise(edges)]
    one, many = collate([whole]), collate(parts)
    for name in one.__slots__:
        expected, actual = getattr(one, name), getattr(many, name)
        assert torch.equal(expected, actual) if isinstance(expected, torch.Tensor) else expected == actual, name


@pytest.fixture(scope="module")
def mixed_rows_once():
    rng = np.random.default_rng(0)
    rows = []
    for index in range(6):
        images, frames = index % 3, [3 * index] if index % 2 else []
        length = 4 + index
        rows.append(
            {
                "sample_id": index,
                "input_ids": rng.integers(3, 60, length),
                "labels": rng.integers(3, 60, length),
                "patches": rng.integers(0, 256, images * 4 * 12, dtype=np.uint8),
                "image_grids": [[1, 2, 2]] * images,
                "mel": rng.standard_normal(sum(frames) * 4).astype(np.float16),
                "mel_frames": frames,
                "flags": 0,
            }
        )
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def test_payload_of_one_batch_is_a_view_of_its_buffers(mixed_rows, make_batch):
    batch = make_batch(mixed_rows)
    packed = collate([batch])
    assert packed.patches.data_ptr() == batch.column("patches").flatten().buffers()[1].address
    assert packed.mel.data_ptr() == batch.column("mel").flatten().buffers()[1].address


def test_views_outlive_the_batch(mixed_rows, make_batch):
    packed = collate([make_batch(mixed_rows)])  # the batch itself is gone here
    np.testing.assert_array_equal(packed.patches.numpy().ravel(), np.concatenate([row["patches"] for row in mixed_rows]))


@pytest.mark.parametrize("batches", [[], [pa.RecordBatch.from_pylist([], schema=SCHEMA)]], ids=["no batch", "no rows"])
def test_nothing_packs_to_an_empty_microbatch(batches):
    packed = collate(batches)
    assert (len(packed.sample_ids), len(packed.input_ids), packed.num_targets) == (0, 0, 0)
    assert packed.cu_seqlens.tolist() == packed.image_cu_seqlens.tolist() == packed.mel_cu_seqlens.tolist() == [0]
    assert packed.patches.shape == packed.mel.shape == (0, 0)
    assert packed.image_grids.shape == (0, 3)


def test_text_alone_has_no_media(make_row, make_batch):
    packed = collate([make_batch([make_row(1), make_row(2)])])
    assert packed.patches.shape == packed.mel.shape == (0, 0)
    assert packed.num_targets == 8


def test_samples_without_tokens_are_empty_segments(make_row, make_batch):
    empty = make_row(1) | {"input_ids": [], "labels": []}
    packed = collate([make_batch([empty, make_row(2, answer=1), empty])])
    assert packed.cu_seqlens.tolist() == [0, 0, 5, 5]
    assert packed.num_targets == 1


def test_to_moves_the_payload_and_leaves_the_layout_on_the_host(mixed_rows, make_batch):
    packed = collate([make_batch(mixed_rows)]).to("meta")
    assert {packed.input_ids.device.type, packed.labels.device.type, packed.position_ids.device.type} == {"meta"}
    assert {packed.patches.device.type, packed.mel.device.type} == {"meta"}
    assert {packed.cu_seqlens.device.type, packed.image_grids.device.type, packed.mel_frames.device.type} == {"cpu"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [1]}, "different numbers of input_ids and labels"),
        ({"patches": np.zeros(4 * 12 + 1, np.uint8), "image_grids": [[1, 2, 2]]}, "no whole number of rows"),
        ({"patches": np.zeros(12, np.uint8)}, "0 patches"),
        ({"image_grids": [[1, 2, 2]]}, "0 values for 4 patches"),
        ({"mel": np.zeros(5, np.float16), "mel_frames": [2]}, "5 values for 2 mel frames"),
    ],
)
def test_columns_that_do_not_fit_are_refused(change, message, make_row, make_batch):
    with pytest.raises(HeadraceError, match=message):
        collate([make_batch([make_row(1) | change])])


def test_another_schema_is_refused():
    with pytest.raises(HeadraceError, match="not the schema"):
        collate([pa.RecordBatch.from_pydict({"sample_id": [1]})])


def test_what_no_sample_has_is_empty_but_as_wide_as_ever(make_row, make_batch):
    """So that a model's linear layers take it."""
    packed = collate([make_batch([make_row(1)])], patch_values=588, mel_bins=128)
    empty = collate([], patch_values=588, mel_bins=128)
    for microbatch in (packed, empty):
        assert (microbatch.patches.shape, microbatch.mel.shape) == ((0, 588), (0, 128))
