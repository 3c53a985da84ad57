"""Rows of a microbatch whose samples ranks share: each token is on one of them, with its label and position."""

from __future__ import annotations

import pytest
import torch

from headrace.errors import UserError
from headrace.sample import UNIT_COLUMNS
from headrace.trainer.context.gathered_attention import GatheredAttention, PackedSequences
from headrace.trainer.context.sequence_rows import SequenceRows
from headrace.trainer.loading.collate import PackedMicrobatch
from tests.verify.batches import packed_samples

BLOCK = 8
MEMBERS = [(0, 1, 2), (0, 1, 2), (1, 2), (1, 2)]
"""Of samples 0 to 3, of which rank 1 has a part of each."""


def whole() -> PackedMicrobatch:
    return packed_samples((0, 1, 2, 3), audio=True, columns=UNIT_COLUMNS["llm"])


def rows_of(rank: int) -> SequenceRows:
    """Of the samples that the rank shares."""
    data = whole()
    some = [number for number, ranks in enumerate(MEMBERS) if rank in ranks]
    assert some == list(range(len(some))), "in one piece from the first on, so that places are those of all samples"
    return SequenceRows.of(data.cu_seqlens[: len(some) + 1], MEMBERS[: len(some)], rank, block=BLOCK)


def test_each_token_is_on_one_rank() -> None:
    owned = torch.cat([rows_of(rank).places for rank in range(3)])
    assert torch.equal(owned.sort().values, torch.arange(int(whole().cu_seqlens[-1])))


def test_labels_positions_and_weights_stay_those_of_the_whole() -> None:
    data, rows = whole(), rows_of(1)
    own = rows.take(data)
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(getattr(own, name), getattr(data, name)[rows.places]), name
    assert own.cu_seqlens.tolist() == [0, *rows.counts.cumsum(0).tolist()]
    assert own.num_targets == int((own.labels >= 0).sum())
    assert len(own.rows) == 0, "to a model it is a microbatch like any other"
    assert sum(rows_of(rank).take(data).target_weight for rank in (1, 2)) <= data.target_weight


def test_samples_of_the_same_ranks_exchange_at_once_and_others_by_themselves() -> None:
    data = whole()
    rows = SequenceRows.of(data.cu_seqlens, [(0, 1), (0, 1), (0,), (0,)], 0, block=BLOCK)
    shared, alone = rows.attention.parts
    assert isinstance(shared, GatheredAttention)
    assert isinstance(alone, PackedSequences)
    assert rows.attention.members == ((0, 1), (0,))
    assert shared.num_rows + alone.num_rows == len(rows.places) == int(rows.counts.sum())
    assert alone.segments.lengths == tuple(rows.counts[2:].tolist())
    assert (alone.gathered_bytes(2, 4, torch.float32), alone.scattered_bytes(2, 4, torch.float32)) == (0, 0)


def test_which_places_are_among_the_rows() -> None:
    rows = rows_of(2)
    places = torch.arange(0, int(whole().cu_seqlens[-1]), 3)
    found = rows.among(places)
    assert set(places[found].tolist()) == set(places.tolist()) & set(rows.places.tolist())


def test_fewer_blocks_than_ranks_are_refused() -> None:
    with pytest.raises(UserError, match="cp 4 is more than the 1 blocks of the sequence"):
        SequenceRows.of(torch.tensor([0, 7], dtype=torch.int32), [(0, 1, 2, 3)], 0, block=BLOCK)
