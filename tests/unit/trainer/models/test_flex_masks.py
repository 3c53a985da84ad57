"""FlexAttention's form of a mask: its rule, its blocks, and what it computes, against the formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.mask_layouts import AUDIO, TEXT, VISION, packed
from headrace.trainer.models.flex_masks import flex_mask, flex_masked_attention
from headrace.trainer.models.masked_attention import dense_attention, rows_of_blocks
from tests.examples import with_examples
from tests.unit.proto.mask_world import masks, packed_masks


@given(
    mask=st.one_of(masks(), packed_masks()).filter(lambda mask: mask.num_tokens),
    block=st.sampled_from([2, 8, 64]),
    data=st.data(),
)
@with_examples(40)
def test_blocks_and_rule_are_those_of_the_mask(mask, block, data):
    count = -(-mask.num_tokens // block)
    chosen = np.array(sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1))))
    flex = flex_mask(mask, block=block, chosen=chosen)
    places, everywhere = rows_of_blocks(mask.num_tokens, block, chosen), np.arange(mask.num_tokens)
    rows, columns = torch.arange(len(places))[:, None], torch.arange(mask.num_tokens)[None]
    nowhere = torch.tensor(0)
    np.testing.assert_array_equal(flex.mask_mod(nowhere, nowhere, rows, columns).numpy(), mask.visible(places, everywhere))
    np.testing.assert_array_equal(flex.to_dense()[0, 0].numpy() > 0, mask.block_map(block, chosen) > 0)
    assert flex.seq_lengths == (len(places), mask.num_tokens)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_it_computes_the_same():
    mask = packed([[(VISION, 40), (TEXT, 70)], [(TEXT, 30), (AUDIO, 50), (TEXT, 10)]], padding=20)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(220, heads, 16, generator=generator) for heads in (4, 2, 2))
    chosen = np.array([0, 2, 3, 6])
    places = rows_of_blocks(220, 32, chosen)
    ours = flex_masked_attention(q[places], k, v, flex_mask(mask, block=32, chosen=chosen))
    torch.testing.assert_close(ours, dense_attention(q[places], k, v, mask, places), atol=1e-5, rtol=1e-5)
