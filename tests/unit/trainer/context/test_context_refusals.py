"""What context parallelism refuses, before a collective begins: here no other process is there to meet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from headrace.attention_mask import AttentionMask
from headrace.errors import HeadraceError, UserError
from headrace.mask_layouts import TEXT, packed
from headrace.trainer.context.context_model import ContextModel
from headrace.trainer.context.context_share import ContextShare
from headrace.trainer.loading.token_shares import TokenShares
from tests.verify.batches import AUDIO, GENERATING, IMAGE, whole_model
from tests.verify.context_models import CASES, ModelCase, slice_for, wrapped

MASK = packed([[(TEXT, 100)]])


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Of four, of which this is the first; the others are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def heads(count: int, tokens: int = 25, width: int = 4) -> torch.Tensor:
    return torch.zeros(tokens, count, width)


def test_more_ranks_than_blocks(group: dist.ProcessGroup) -> None:
    with pytest.raises(UserError, match="cp 4 is more than the 1 blocks of the sequence"):
        ContextShare.of(MASK, group)
    model = ContextModel(ModelCase(4).model(), group, image=IMAGE, audio=AUDIO)
    with pytest.raises(UserError, match=r"cp 4 is more than the \d blocks of the sequence, .* or smaller blocks"):
        model(ModelCase(4, samples=(0, 1, 2)).microbatch())


def test_heads_that_do_not_divide(group: dist.ProcessGroup) -> None:
    attend = ContextShare.of(MASK, group, block=1).attention
    with pytest.raises(UserError, match="4 heads of queries do not divide by 3 heads of keys"):
        attend(heads(4), heads(3), heads(3))
    with pytest.raises(UserError, match="heads_at_once is 0: gather at least one head of keys at a time"):
        ContextShare.of(MASK, group, block=1, heads_at_once=0)


def test_rows_of_another_share(group: dist.ProcessGroup) -> None:
    attend = ContextShare.of(MASK, group, block=1).attention
    with pytest.raises(UserError, match="share of the sequence is 25 tokens, but there are 25 queries, 100 keys and 100 values"):
        attend(heads(4), heads(2, 100), heads(2, 100))


def test_shares_for_another_group_or_mask(group: dist.ProcessGroup) -> None:
    with pytest.raises(
        UserError, match=r"100 tokens are distributed over cp 2, but .* mask is of 100 and the group of 4 processes"
    ):
        ContextShare.of(MASK, group, shares=TokenShares.of(MASK, 2, block=8))
    with pytest.raises(
        UserError, match=r"100 tokens are distributed over cp 1, but .* mask is of 60 and the group of 1 processes"
    ):
        ContextShare.of(packed([[(TEXT, 60)]]), None, shares=TokenShares.of(MASK, 1))


def test_a_mask_that_sees_nothing(group: dist.ProcessGroup) -> None:
    with pytest.raises(UserError, match="no token of the sequence sees another, as in padding alone: leave the sequence out"):
        ContextShare.of(AttentionMask(fields=np.zeros(100, np.int64)), group, block=8)


def test_a_slice_of_another_order(group: dist.ProcessGroup) -> None:
    case = CASES["slices with dropout"]
    model = ContextModel(case.model(), group, image=IMAGE, audio=AUDIO, block=16)
    with pytest.raises(UserError, match="the slice is not this rank's share of cp 4 in blocks of 16 tokens"):
        model(slice_for(case, 0))
    with pytest.raises(UserError, match="has its attention mask only if cp_order is balanced"):
        model(replace(slice_for(case, 0), mask_fields=torch.zeros(0, dtype=torch.int64)))


def test_models_that_take_whole_sequences(group: dist.ProcessGroup) -> None:
    with pytest.raises(UserError, match="context parallelism does not cut a generator's input"):
        ContextModel(whole_model(GENERATING), group, image=IMAGE, audio=AUDIO)


def test_degrees_that_leave_a_rank_idle_or_name_another(group: dist.ProcessGroup) -> None:
    def model(*ranks: tuple[int, ...]) -> ContextModel:
        return wrapped(ModelCase(4, degrees=ranks), ModelCase(4).model(), group)

    data = ModelCase(4, samples=(0, 1)).microbatch()
    with pytest.raises(UserError, match=r"rank 2 has none of the 2 sequences, .*: give one of them more ranks"):
        model((0,), (1, 3))(data)
    with pytest.raises(UserError, match=r"there are ranks \[\[0\], \[1, 4\]\] for 2 sequences on 4 ranks: .* ranks 0 to 3"):
        model((0,), (1, 4))(data)
    with pytest.raises(UserError, match="for 2 sequences on 4 ranks"):
        model((0, 1, 2, 3))(data)
    with pytest.raises(UserError, match=r"cp 4 is more than the \d blocks of the sequence"):
        wrapped(ModelCase(4, degrees=((0, 1, 2, 3), (0,))), ModelCase(4).model(), group)(
            ModelCase(4, samples=(0, 1)).microbatch()
        )


def test_degrees_in_a_group_that_some_ranks_are_not_in(group: dist.ProcessGroup) -> None:
    """Groups for degrees are made by all ranks together, and those outside would not come."""
    half = dist.new_group([0, 1])
    with pytest.raises(UserError, match="shared by all 4 ranks, but the group has 2: give the group of all ranks, or leave out"):
        wrapped(ModelCase(2, degrees=((0,), (1,))), ModelCase(2).model(), half)
    assert wrapped(ModelCase(2), ModelCase(2).model(), half) is not None, "without degrees any group will do"


def test_media_that_are_encoded_to_another_number_of_tokens() -> None:
    share = ContextShare.of(MASK, None)
    rows = share.media(np.array([3, 4, 5]), np.zeros(3, np.int64))
    with pytest.raises(HeadraceError, match="2 tokens of media were encoded for 3 placeholders"):
        rows.fill(torch.zeros(100, 4), torch.ones(2, 4))


def test_a_microbatch_of_nothing_needs_no_other_rank(group: dist.ProcessGroup) -> None:
    empty = ModelCase(4, samples=()).microbatch()
    loss = wrapped(ModelCase(4), ModelCase(4).model(), group)(empty)
    assert (float(loss.loss_sum), loss.target_weight, loss.is_shared) == (0.0, 0.0, False)
    share = ContextShare.of(AttentionMask(fields=np.zeros(0, np.int64)), group)
    assert share.attention(heads(4, 0), heads(2, 0), heads(2, 0)).shape == (0, 4, 4)
