"""Attention of the blocks that queries see, against the formula with the whole matrix."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.attention_mask import AttentionMask
from headrace.errors import UserError
from headrace.mask_layouts import TEXT, VISION, packed
from headrace.trainer.models.masked_attention import MaskRuns, dense_attention, masked_attention, rows_of_blocks
from tests.examples import with_examples
from tests.unit.proto.mask_world import masks, packed_masks


def inputs(num_queries, num_keys, kv_heads=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_queries, 4, 8), (num_keys, kv_heads, 8), (num_keys, kv_heads, 8))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def with_gradients(attend, tensors):
    output = attend(*tensors)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), tensors)]


@given(mask=st.one_of(masks(), packed_masks()), block=st.sampled_from([1, 3, 8, 128]), kv_heads=st.sampled_from([1, 2, 4]))
@with_examples(40)
def test_equals_the_formula_forward_and_backward(mask, block, kv_heads):
    tensors = inputs(mask.num_tokens, mask.num_tokens, kv_heads)
    runs = MaskRuns.of(mask, block=block)
    expected = with_gradients(lambda q, k, v: dense_attention(q, k, v, mask), tensors)
    for ours, theirs in zip(with_gradients(lambda q, k, v: masked_attention(q, k, v, runs), tensors), expected, strict=True):
        assert not theirs.isnan().any()
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@given(mask=packed_masks(), block=st.sampled_from([3, 8]), num_ranks=st.integers(1, 4), seed=st.integers(0, 9))
@with_examples(40)
def test_the_parts_of_ranks_are_the_whole(mask, block, num_ranks, seed):
    """Each rank has the queries of its blocks and all keys; gradients of keys are the sums over ranks."""
    q, k, v = inputs(mask.num_tokens, mask.num_tokens)
    expected = with_gradients(lambda q, k, v: dense_attention(q, k, v, mask), (q, k, v))
    weights = torch.linspace(-1, 1, q.numel()).view_as(q)
    num_blocks = -(-mask.num_tokens // block)
    owner = np.random.default_rng(seed).integers(0, num_ranks, num_blocks)
    whole = [torch.zeros_like(x) for x in expected]
    for rank in range(num_ranks):
        own = np.flatnonzero(owner == rank)
        places = torch.from_numpy(rows_of_blocks(mask.num_tokens, block, own))
        mine = q[places].detach().requires_grad_()
        output = masked_attention(mine, k, v, MaskRuns.of(mask, block=block, chosen=own))
        gradients = torch.autograd.grad((output * weights[places]).sum(), (mine, k, v))
        whole[0][places], whole[1][places] = output.detach(), gradients[0]
        whole[2] += gradients[1]
        whole[3] += gradients[2]
    for ours, theirs in zip(whole, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_half_precision_adds_up_in_single():
    mask = packed([[(TEXT, 200)]])
    tensors = inputs(200, 200, dtype=torch.bfloat16)
    ours = with_gradients(lambda q, k, v: masked_attention(q, k, v, MaskRuns.of(mask, block=8)), tensors)
    exact = with_gradients(lambda q, k, v: dense_attention(q, k, v, mask), [x.detach().float().requires_grad_() for x in tensors])
    for one, other in zip(ours, exact, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one - other).norm() < 0.02 * other.norm()


def test_blocks_that_nobody_sees_are_not_computed():
    two = MaskRuns.of(packed([[(TEXT, 512)], [(TEXT, 512)]]), block=128)
    assert two.num_pairs == 2 * (1 + 2 + 3 + 4) * 128**2
    image = MaskRuns.of(packed([[(VISION, 512)]], padding=256), block=128)
    assert image.num_pairs == 512**2
    (run,) = image.runs
    assert run.seen is None
    assert image.num_queries == image.num_keys == 768


def test_nothing_is_seen_in_padding():
    mask = packed([[(TEXT, 3)]], padding=5)
    tensors = inputs(8, 8)
    output, *gradients = with_gradients(lambda q, k, v: masked_attention(q, k, v, MaskRuns.of(mask, block=4)), tensors)
    assert all((x[3:] == 0).all() for x in (output, *gradients))
    alone = MaskRuns.of(AttentionMask(fields=np.zeros(8, np.int64)), block=4)
    assert all((x == 0).all() for x in with_gradients(lambda q, k, v: masked_attention(q, k, v, alone), tensors))


def test_what_does_not_fit_is_refused():
    mask = packed([[(TEXT, 6)]])
    q, k, v = inputs(6, 6, kv_heads=3)
    with pytest.raises(UserError, match="4 heads of queries do not divide by 3 heads of keys"):
        masked_attention(q, k, v, MaskRuns.of(mask))
    q, k, v = inputs(6, 5)
    with pytest.raises(UserError, match="of 6 queries and 6 keys, but there are 6 and 5"):
        dense_attention(q, k, v, mask)
