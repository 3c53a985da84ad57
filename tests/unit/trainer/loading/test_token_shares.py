"""Shares of a sequence: each token is one rank's, ranks have level work and tokens, and what cannot be cut is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.attention_mask import AttentionMask
from headrace.errors import UserError
from headrace.mask_layouts import TEXT, VISION, packed
from headrace.trainer.loading.token_shares import TokenShares
from tests.examples import with_examples
from tests.unit.proto.mask_world import packed_masks


@given(mask=packed_masks(), block=st.sampled_from([1, 3, 8]), data=st.data())
@with_examples(40)
def test_every_token_is_one_ranks(mask, block, data):
    num_blocks = -(-mask.num_tokens // block)
    num_ranks = data.draw(st.integers(1, min(4, num_blocks)))
    shares = TokenShares.of(mask, num_ranks, block=block)
    places = [shares.places(rank) for rank in range(num_ranks)]
    assert sorted(np.concatenate(places).tolist()) == list(range(mask.num_tokens))
    assert np.concatenate(places).tolist() == shares.in_order().tolist()
    assert shares.counts.tolist() == [len(of_rank) for of_rank in places]
    assert shares.longest <= -(-num_blocks // num_ranks) * block
    rows = shares.rows()
    for rank, of_rank in enumerate(places):
        assert (np.diff(of_rank) > 0).all()
        assert rows[of_rank].tolist() == list(range(len(of_rank)))
        assert (shares.owners(of_rank) == rank).all()
        assert set(of_rank // block) == set(shares.blocks(rank))


def test_work_is_level_where_equal_parts_are_not():
    mask = packed([[(VISION, 256), (TEXT, 768)]])
    shares = TokenShares.of(mask, 4, block=32)
    work = np.bincount(shares.ranks, weights=mask.touched_blocks(32))
    assert shares.counts.tolist() == [256] * 4
    assert work.max() <= 1.02 * work.mean()


def test_of_nothing_no_rank_has_any():
    shares = TokenShares.of(AttentionMask(fields=np.zeros(0, np.int64)), 3)
    assert (shares.counts.tolist(), shares.longest, shares.places(2).tolist()) == ([0, 0, 0], 0, [])


def test_what_cannot_be_cut_is_refused():
    mask = packed([[(TEXT, 20)]])
    with pytest.raises(UserError, match="cp 4 is more than the 3 blocks of the sequence, so that a rank would have none"):
        TokenShares.of(mask, 4, block=8)
    with pytest.raises(UserError, match="no token of the sequence sees another"):
        TokenShares.of(AttentionMask(fields=np.zeros(20, np.int64)), 2, block=8)
    with pytest.raises(UserError, match=r"blocks go to the ranks \[0, 2\], 3 in number: give each of the 3 blocks to one of 2"):
        TokenShares(num_tokens=20, num_ranks=2, ranks=np.array([0, 2, 0]), block=8)
