"""Slices by the work of attention: together they are the whole, equally long, and each has the mask of the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.errors import UserError
from headrace.trainer import Parallel
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.loading.microbatch_mask import microbatch_mask, slice_mask
from headrace.trainer.loading.slices import Balanced, padded_to_slices, rows_of_slices, slice_of, targets_of_slices
from tests.unit.trainer.loading.test_packs import collated
from tests.verify.batches import AUDIO, AUDIO_TOKEN, IMAGE, IMAGE_TOKEN, packed_samples
from tests.verify.context_models import SPEC, VOCABULARY

SAMPLES = (0, 1, 2, 3, 4, 5)


def cut(data: PackedMicrobatch, size: int, order: Balanced, pad_to: int = 1) -> tuple[PackedMicrobatch, list[PackedMicrobatch]]:
    """(the padded whole, the slice of each rank), as the loader has them."""
    whole = order.with_mask(padded_to_slices(data, size, order, pad_to, token=0), SPEC, VOCABULARY)
    rows = rows_of_slices(whole, size, order)
    return whole, [slice_of(whole, rows[rank], count) for rank, count in enumerate(targets_of_slices(whole, rows))]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("pad_to", [1, 12])
def test_slices_are_alike_in_length_and_together_the_whole(size: int, pad_to: int) -> None:
    data = packed_samples(SAMPLES, audio=True)
    whole, slices = cut(data, size, Balanced(block=8), pad_to)
    assert whole.num_targets == data.num_targets == sum(one.num_targets for one in slices)
    assert {len(one.input_ids) for one in slices} == {len(whole.input_ids) // size}
    assert len(slices[0].input_ids) % 8 == len(slices[0].input_ids) % pad_to == 0
    for name in ("input_ids", "labels", "position_ids", "target_weights"):
        joined = torch.empty_like(getattr(whole, name))
        for one in slices:
            joined[one.rows] = getattr(one, name)
        assert torch.equal(joined, getattr(whole, name)), name
    for one in slices:
        assert torch.equal(one.cu_seqlens, whole.cu_seqlens)
        assert torch.equal(one.patches, whole.patches)


def test_each_slice_has_the_mask_of_the_whole_by_which_work_is_level() -> None:
    order = Balanced(block=8, images="before")
    whole, slices = cut(packed_samples(tuple(range(24)), audio=True), 4, order)
    tokens = {"image_token": IMAGE_TOKEN, "audio_token": AUDIO_TOKEN}
    itself = microbatch_mask(whole, image=IMAGE, audio=AUDIO, **tokens)
    for rank, one in enumerate(slices):
        mask = slice_mask(one)
        assert not np.array_equal(mask.fields, itself.fields), "images see what comes before"
        assert torch.equal(order.rows(one, 4)[rank], one.rows)
    work = mask.touched_blocks(8)
    of_ranks = [work[np.unique(one.rows.numpy() // 8)].sum() for one in slices]
    assert max(of_ranks) <= 1.1 * np.mean(of_ranks)


def test_a_microbatch_of_nothing_or_of_less_than_a_block_is_cut_too() -> None:
    _, slices = cut(collated({}), 3, Balanced())
    assert [len(one.input_ids) for one in slices] == [0, 0, 0]
    short = packed_samples((34,), audio=True)
    whole, slices = cut(short, 3, Balanced())
    assert [len(one.input_ids) for one in slices] == [128] * 3
    assert sum(one.num_targets for one in slices) == whole.num_targets == short.num_targets > 0


def test_other_slices_have_no_mask() -> None:
    with pytest.raises(UserError, match="has its attention mask only if cp_order is balanced"):
        slice_mask(collated({4: 5}))


def test_it_is_chosen_by_name_or_with_what_media_see() -> None:
    assert Parallel(cp_order="balanced").order == Balanced()
    assert Parallel(cp_order=Balanced(images="text")).order == Balanced(images="text")
    with pytest.raises(UserError, match="recordings of a balanced cp_order see 'nothing': take itself, before or text"):
        Balanced(recordings="nothing")
    with pytest.raises(UserError, match="block of a balanced cp_order is 0"):
        Balanced(block=0)
