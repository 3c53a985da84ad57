"""Packing: what the tensors hold, what is shared with Arrow, what is refused."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import HeadraceError, UserError
from headrace.sample import LABEL_IGNORED, SCHEMA, UNIT_COLUMNS
from headrace.trainer.loading.buffers import ALIGNMENT, BufferPool, PinnedMemory
from headrace.trainer.loading.collate import PackedMicrobatch, collate


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


def address_range(tensor: torch.Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


class CountingPool(BufferPool):
    """Remembers where its buffers lay."""

    def __init__(self) -> None:
        super().__init__(max_idle_bytes=1 << 30)
        self.taken: list[range] = []

    def take(self, num_bytes: int) -> torch.Tensor:
        buffer = super().take(num_bytes)
        self.taken.append(address_range(buffer))
        return buffer


def test_several_batches_are_copied_once_straight_into_one_buffer_that_is_used_again(mixed_rows, make_batch):
    """Whatever else is allocated, by numpy or by torch, is small: there is no room for a copy in between."""
    grid = [1, 58_254, 6]  # 4 MiB of patches and 1 MiB of mel a batch
    row = mixed_rows[1] | {"patches": (np.arange(58_254 * 6 * 12) % 251).astype(np.uint8), "image_grids": [grid]}
    row |= {"mel": (np.arange(1 << 19) % 1000).astype(np.float16), "mel_frames": [1 << 17]}
    batches = [make_batch([row]) for _ in range(4)]
    pool = CountingPool()
    packed = collate(batches, buffers=pool)
    (first,) = pool.taken
    for tensor in (packed.patches, packed.mel):
        assert address_range(tensor).start in first
        assert address_range(tensor)[-1] in first
        assert tensor.data_ptr() % ALIGNMENT == 0
    assert torch.equal(packed.patches.flatten(), torch.from_numpy(np.tile(row["patches"], 4)))
    assert torch.equal(packed.mel.flatten(), torch.from_numpy(np.tile(row["mel"], 4)))
    del packed, tensor

    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        tracemalloc.start()
        collate(batches, buffers=pool)
        _, peak_bytes = tracemalloc.get_traced_memory()  # numpy tells it of every array
        tracemalloc.stop()
    assert pool.taken[1] == first, "warm"
    assert peak_bytes < 1 << 20
    assert sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages()) < 1 << 20


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs a GPU")
def test_with_a_gpu_a_single_batch_is_copied_into_pinned_memory(mixed_rows, make_batch):
    pool = BufferPool(0, pinned=PinnedMemory())
    packed = collate([make_batch(mixed_rows)], buffers=pool)
    assert packed.patches.is_pinned()
    assert packed.mel.is_pinned()
    assert_same(packed, collate([make_batch(mixed_rows)]))


# -- units ------------------------------------------------------------------------------------------------------------

MEDIA_OF = {"encoder": {"patches", "mel"}, "vision": {"patches"}, "audio": {"mel"}, "llm": set(), "generator": {"patches"}}
OF_COLUMN = {
    "input_ids": {"input_ids", "position_ids", "cu_seqlens", "pack_offsets"},
    "labels": {"labels"},
    "patches": {"patches"},
    "image_grids": {"image_grids", "image_cu_seqlens", "images_per_sample"},
    "image_sizes": {"image_sizes"},
    "mel": {"mel"},
    "mel_frames": {"mel_frames", "mel_cu_seqlens", "recordings_per_sample"},
}
PER_SAMPLE = {"cu_seqlens", "pack_offsets", "images_per_sample", "recordings_per_sample"}
"""Zeros, not empty, where a unit does not receive their columns."""


def assert_same(actual: PackedMicrobatch, expected: PackedMicrobatch) -> None:
    for name in expected.__slots__:
        one, other = getattr(actual, name), getattr(expected, name)
        assert torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other, name


@pytest.mark.parametrize("num_batches", [1, 3])
@pytest.mark.parametrize("unit", UNIT_COLUMNS)
def test_a_unit_s_columns_pack_to_the_same_tensors_and_the_others_are_empty(mixed_rows, make_batch, unit, num_batches):
    rows = [mixed_rows[start::num_batches] for start in range(num_batches)]
    full = collate([make_batch(part) for part in rows])
    packed = collate(
        [make_batch(part).select(list(UNIT_COLUMNS[unit])) for part in rows], patch_values=full.patches.shape[1], mel_bins=4
    )
    there = set().union(*(OF_COLUMN.get(column, set()) for column in UNIT_COLUMNS[unit]))
    for name in PackedMicrobatch.__slots__:
        actual, expected = getattr(packed, name), getattr(full, name)
        if name == "num_targets":
            assert actual == (expected if "labels" in there else 0)
        elif name in PER_SAMPLE:
            assert torch.equal(actual, expected if name in there else torch.zeros_like(expected)), name
        elif name in there | {"sample_ids", "sample_segments"}:
            assert torch.equal(actual, expected), name
        else:
            assert actual.dtype == expected.dtype
            assert actual.shape[1:] == expected.shape[1:]
            assert actual.numel() == 0 or actual.tolist() == [0], name
    assert there & {"patches", "mel"} == MEDIA_OF[unit]
    assert ("labels" in there) == ("input_ids" in there) == (unit == "llm")


def test_a_unit_s_columns_are_of_the_schema_and_in_its_order():
    for unit, columns in UNIT_COLUMNS.items():
        assert [name for name in SCHEMA.names if name in columns] == list(columns), unit
        assert columns[0] == "sample_id"


@pytest.mark.parametrize(
    "batches",
    [
        [pa.RecordBatch.from_pylist([], schema=pa.schema([field for field in SCHEMA if field.name != "sample_id"]))],
        [pa.RecordBatch.from_pylist([], schema=pa.schema(list(SCHEMA)[::-1]))],
        [pa.RecordBatch.from_pylist([], schema=SCHEMA), pa.RecordBatch.from_pylist([], schema=pa.schema(list(SCHEMA)[:3]))],
        [pa.RecordBatch.from_pylist([], schema=pa.schema([SCHEMA.field("sample_id"), pa.field("extra", pa.int8())]))],
    ],
    ids=["no ids", "another order", "different columns", "a column of its own"],
)
def test_other_columns_are_refused(batches):
    with pytest.raises(HeadraceError, match="not the schema"):
        collate(batches)


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


def test_a_token_outside_of_the_vocabulary_is_refused(make_row, make_batch):
    rows = [make_row(7), make_row(8), make_row(9)]
    rows[1]["input_ids"][-1] = 64
    batches = [make_batch(rows[:1]), make_batch(rows[1:])]
    assert len(collate(batches, vocab_size=65).sample_ids) == 3
    with pytest.raises(UserError, match=r"sample 8 has the token 64, .* ends with 63: give every preprocessor the tokenizer"):
        collate(batches, vocab_size=64)


def test_another_schema_is_refused():
    with pytest.raises(HeadraceError, match="not the schema"):
        collate([pa.RecordBatch.from_pydict({"sample_id": [1]})])


def test_what_no_sample_has_is_empty_but_as_wide_as_ever(make_row, make_batch):
    """So that a model's linear layers take it."""
    packed = collate([make_batch([make_row(1)])], patch_values=588, mel_bins=128)
    empty = collate([], patch_values=588, mel_bins=128)
    for microbatch in (packed, empty):
        assert (microbatch.patches.shape, microbatch.mel.shape) == ((0, 588), (0, 128))
