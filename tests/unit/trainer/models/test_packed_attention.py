"""Attention inside segments, against the formula written out per head."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.trainer.models.attention import Segments, packed_attention


def segments_of(lengths):
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    return Segments.of(offsets)


def by_the_formula(q, k, v, lengths, causal):
    out, start = torch.zeros_like(q), 0
    for length in lengths:
        rows = slice(start, start + length)
        for head in range(q.shape[1]):
            shared = head // (q.shape[1] // k.shape[1])
            scores = q[rows, head] @ k[rows, shared].T / math.sqrt(q.shape[2])
            if causal:
                scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
            out[rows, head] = scores.softmax(-1) @ v[rows, shared]
        start += length
    return out


@given(lengths=st.lists(st.integers(0, 5), max_size=6), causal=st.booleans(), kv_heads=st.sampled_from([1, 2, 4]))
def test_equals_the_formula(lengths, causal, kv_heads):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), heads, 8, generator=generator) for heads in (4, kv_heads, kv_heads))
    out = packed_attention(q, k, v, segments_of(lengths), causal=causal)
    torch.testing.assert_close(out, by_the_formula(q, k, v, lengths, causal), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_stay_inside_the_segment(causal):
    q, k, v = (torch.randn(9, 2, 8, generator=torch.Generator().manual_seed(i), requires_grad=True) for i in range(3))
    packed_attention(q, k, v, segments_of([4, 2, 3]), causal=causal)[4:6].sum().backward()
    for tensor in (q, k, v):
        inside = tensor.grad.abs().sum(dim=(1, 2)) > 0
        assert not inside[:4].any()
        assert not inside[6:].any()
    assert (v.grad[4:6] != 0).all()
