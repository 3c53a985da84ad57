"""Context-parallel slices: together they are the whole microbatch, and alike in length; what a loss needs is in each of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.errors import UserError
from headrace.sample import LABEL_IGNORED
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.loading.packs import in_packs
from headrace.trainer.loading.slices import (
    SliceOrder,
    contiguous,
    padded_to_slices,
    rows_of_slices,
    slice_of,
    targets_of_slices,
    zigzag,
)
from tests.unit.trainer.loading.test_packs import collated, tokens_of

lengths = st.lists(st.integers(1, 20), max_size=6).map(lambda drawn: dict(enumerate(drawn)))
sizes = st.integers(1, 4)
orders = st.sampled_from([zigzag, contiguous])
multiples = st.integers(1, 5)


def cut(data: PackedMicrobatch, size: int, order: SliceOrder, pad_to: int) -> tuple[PackedMicrobatch, list[PackedMicrobatch]]:
    """(the padded whole, the slice of each rank)."""
    whole = padded_to_slices(data, size, order, pad_to, token=0)
    rows = rows_of_slices(whole, size, order)
    return whole, [slice_of(whole, rows[r], count) for r, count in enumerate(targets_of_slices(whole, rows))]


@given(lengths, sizes, orders, multiples)
def test_slices_are_alike_in_length_and_together_the_whole(
    drawn: dict[int, int], size: int, order: SliceOrder, pad_to: int
) -> None:
    whole, slices = cut(collated(drawn), size, order, pad_to)
    assert len({len(one.input_ids) for one in slices}) == 1
    assert len(slices[0].input_ids) % pad_to == 0
    for name in ("input_ids", "labels", "position_ids"):
        joined = torch.empty_like(getattr(whole, name))
        for one in slices:
            joined[one.rows] = getattr(one, name)
        assert torch.equal(joined, getattr(whole, name)), name
    assert sum(one.num_targets for one in slices) == whole.num_targets
    for one in slices:
        assert one.num_targets == int((one.labels != LABEL_IGNORED).sum())


@given(lengths, sizes, orders, multiples)
def test_padding_changes_no_sample(drawn: dict[int, int], size: int, order: SliceOrder, pad_to: int) -> None:
    """Its tokens stand where its segment begins, with their labels and positions; behind them there is nothing to learn."""
    plain = collated(drawn)
    whole = padded_to_slices(plain, size, order, pad_to, token=0)
    assert whole.num_targets == plain.num_targets == int((whole.labels != LABEL_IGNORED).sum())
    for sample, tokens in tokens_of(plain).items():
        assert (padded := tokens_of(whole)[sample])[: len(tokens)] == tokens
        assert not any(padded[len(tokens) :])
    starts, firsts = plain.cu_seqlens.tolist(), whole.cu_seqlens.tolist()
    for start, end, first in zip(starts, starts[1:], firsts, strict=False):
        for name in ("labels", "position_ids"):
            assert torch.equal(getattr(plain, name)[start:end], getattr(whole, name)[first : first + end - start])
    added = len(whole.input_ids) - len(plain.input_ids)
    assert added < (2 * size * len(drawn) + 2 * size * pad_to if order is zigzag else size * pad_to)


@given(lengths, multiples)
def test_packs_stay_whole_segments(drawn: dict[int, int], pad_to: int) -> None:
    samples = list(drawn)
    plain = in_packs(collated(drawn), [samples[:2], samples[2:]])
    whole = padded_to_slices(plain, 2, zigzag, pad_to, token=0)
    assert set(whole.pack_offsets.tolist()) <= set(whole.cu_seqlens.tolist())
    assert whole.pack_offsets[-1] == len(whole.input_ids)
    for old, new in zip(plain.pack_offsets.tolist(), whole.pack_offsets.tolist(), strict=False):
        assert plain.cu_seqlens.tolist().index(old) == whole.cu_seqlens.tolist().index(new)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(1, 4))
def test_zigzag_gives_all_ranks_the_same_work_under_causal_attention(chunks: list[int], size: int) -> None:
    """A token at place p of its segment attends to p + 1 tokens. In chunks, that is exact."""
    counts = torch.tensor([2 * size * length for length in chunks])
    cu_seqlens = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    work = torch.cat([torch.arange(int(count)) // (int(count) // (2 * size)) for count in counts if count] or [torch.zeros(0)])
    rows = zigzag(cu_seqlens, size)
    assert len({float(work[of_rank].sum()) for of_rank in rows}) == 1


def test_rows_of_the_known_orders() -> None:
    cu_seqlens = torch.tensor([0, 8, 12], dtype=torch.int32)
    assert contiguous(cu_seqlens, 2).tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert zigzag(cu_seqlens, 2).tolist() == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]


def test_an_order_of_ones_own_decides_which_rows_a_rank_gets() -> None:
    def striped(cu_seqlens: Tensor, size: int) -> Tensor:
        return torch.arange(int(cu_seqlens[-1])).view(-1, size).T

    _, slices = cut(collated({0: 6}), 2, striped, 1)
    assert [one.input_ids.tolist() for one in slices] == [[1, 3, 5], [2, 4, 6]]
    assert [one.position_ids.tolist() for one in slices] == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize("wrong", [lambda _, size: torch.zeros(size, 3, dtype=torch.int64), lambda _, size: torch.arange(6)])
def test_an_order_that_loses_tokens_is_refused(wrong: SliceOrder) -> None:
    with pytest.raises(UserError, match=r"cp_order returned rows of shape .* for 6 tokens of 2 ranks"):
        rows_of_slices(collated({0: 6}), 2, wrong)


def test_a_slice_has_no_form_of_the_whole() -> None:
    _, (first, _) = cut(collated({0: 8}), 2, zigzag, 1)
    with pytest.raises(UserError, match="is of a whole microbatch"):
        _ = first.unshifted_labels
    with pytest.raises(UserError, match="is of a whole microbatch"):
        first.padded()
