"""Attention masks of 64 bits a token: who sees whom, and what is counted of it without the matrix."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.attention_mask import MOST_GROUPS, MOST_SEGMENTS, NOTHING, PARTLY, WHOLLY, AttentionMask, field
from headrace.mask_layouts import TEXT, VISION, packed
from tests.unit.proto.mask_world import masks, packed_masks, written_out

ANY = st.one_of(masks(), packed_masks())
BLOCKS = st.sampled_from([1, 2, 3, 8, 64])


def blocks_of(matrix, block):
    """What each block of queries sees of each block of keys, from the whole matrix."""
    cuts = range(0, len(matrix), block)
    tiles = [[matrix[q : q + block, k : k + block] for k in cuts] for q in cuts]
    kinds = [[WHOLLY if tile.all() else PARTLY if tile.any() else NOTHING for tile in row] for row in tiles]
    return np.array(kinds, np.uint8).reshape(len(cuts), len(cuts))


@given(mask=ANY)
def test_tokens_see_what_the_rule_says(mask):
    everywhere = np.arange(mask.num_tokens)
    np.testing.assert_array_equal(mask.visible(everywhere, everywhere), written_out(mask))


@given(mask=ANY)
def test_rows_are_counted_without_the_matrix(mask):
    np.testing.assert_array_equal(mask.row_counts(), written_out(mask).sum(axis=1))


@given(mask=ANY, block=BLOCKS)
@example(mask=AttentionMask(fields=np.zeros(5, np.int64)), block=2)
def test_blocks_are_those_of_the_matrix(mask, block):
    expected = blocks_of(written_out(mask), block)
    np.testing.assert_array_equal(mask.block_map(block), expected)
    np.testing.assert_array_equal(mask.touched_blocks(block), np.count_nonzero(expected, axis=1))


@given(mask=packed_masks(), block=BLOCKS, data=st.data())
def test_a_rank_maps_its_own_blocks_of_queries(mask, block, data):
    whole = mask.block_map(block)
    chosen = data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=6))
    np.testing.assert_array_equal(mask.block_map(block, np.array(chosen, np.int64)), whole[chosen])


def test_a_token_takes_eight_bytes_however_many_there_are():
    mask = packed([[(VISION, 1 << 19), (TEXT, 1 << 19)]])
    assert mask.fields.nbytes == 8 << 20
    counts = mask.row_counts()
    assert (counts[: 1 << 19] == 1 << 19).all()
    np.testing.assert_array_equal(counts[1 << 19 :], np.arange((1 << 19) + 1, (1 << 20) + 1))


def test_the_highest_numbers_have_room():
    last = field(sees=1 << 15, own=15, segment=MOST_SEGMENTS, group=MOST_GROUPS, all_groups=True, causal=True)
    mask = AttentionMask(fields=np.array([last, last], np.int64))
    assert (mask.own[0], mask.segments[0], mask.groups[0]) == (15, MOST_SEGMENTS, MOST_GROUPS)
    assert mask.row_counts().tolist() == [1, 2]


@pytest.mark.parametrize("name", ["sees", "own", "segment", "group"])
def test_a_number_without_room_is_refused(name):
    with pytest.raises(ValueError, match=rf"{name} of a token's attention field must be from 0 to \d+, got 4194304"):
        field(**{"sees": 1, "own": 0, "segment": 1, name: 1 << 22})


def test_a_torn_segment_is_refused():
    fields = [field(sees=1, own=0, segment=segment) for segment in (1, 2, 1)]
    with pytest.raises(ValueError, match=r"tokens of segment 1 .* do not follow each other"):
        AttentionMask(fields=np.array(fields, np.int64))


def test_other_arrays_are_refused():
    with pytest.raises(ValueError, match=r"vector of int64 fields, got shape \(2, 2\)"):
        AttentionMask(fields=np.zeros((2, 2), np.int64))
    mask = packed([[(TEXT, 4)]])
    with pytest.raises(ValueError, match="at least one token, got 0"):
        mask.touched_blocks(0)
    with pytest.raises(ValueError, match="from 0 to 1, got 2 to 2"):
        mask.block_map(2, np.array([2]))
