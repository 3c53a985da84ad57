"""Packed attention of the device in bf16 beside float32 on the CPU, one segment after the other, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, product

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.target import Target
from benchmarks.report import Row, at_most
from headrace.trainer.loading.device_copy import to_device
from headrace.trainer.models.attention import Segments, packed_attention

HEADS = {
    "head dim 64, 4 queries a key": (8, 2, 64),
    "head dim 72": (16, 16, 72),
    "head dim 80": (16, 16, 80),
    "head dim 128, 7 queries a key": (28, 4, 128),
}
"""Query heads, key heads and head dimension of the models that can be named: Llama 3.2 1B, SigLIP, ViT-H and Qwen2-7B."""
LENGTHS = ((1,), (1, 7, 300, 2), (64,) * 9, (513, 1, 1), (1,) * 33)
"""Segments of a packed sequence; an image or a sample may well have length 1."""
ERROR_GOAL = 2e-2
"""bf16 has 8 bits: 4e-3 a rounding, and a few of them add up."""


def measure(target: Target) -> Iterator[Row]:
    """Yield the worst relative error of output and gradients for every kind of heads."""
    for name, (heads, kv_heads, width) in HEADS.items():
        if not target.is_gpu:
            heads, kv_heads = heads // kv_heads, 1
        worst, where = 0.0, ""
        for lengths, causal in product(LENGTHS, (True, False)):
            error = _error(target.device, (heads, kv_heads, width), lengths, causal)
            if not error <= worst:  # also where it is not a number
                worst, where = error, f"segments {lengths}, {'causal' if causal else 'both ways'}"
        yield Row(name=name, value=worst, unit="relative error", goal=at_most(ERROR_GOAL), detail=f"worst: {where}")


def _error(device: torch.device, sizes: tuple[int, int, int], lengths: Sequence[int], causal: bool) -> float:
    """Return the largest error of output and gradients, each relative to the norm of what is expected.

    A segment of one token has gradients of exactly 0 for queries and keys: there it is relative to the output's gradient.
    """
    heads, kv_heads, width = sizes
    generator, num_tokens = torch.Generator().manual_seed(0), sum(lengths)
    inputs = [torch.randn(num_tokens, count, width, generator=generator) for count in (heads, kv_heads, kv_heads)]
    gradient = torch.randn(num_tokens, heads, width, generator=generator)
    expected = [x.clone().requires_grad_() for x in inputs]
    output = _by_segment(expected, lengths, causal)
    torch.autograd.backward(output, gradient)
    ours = [x.to(device, torch.bfloat16).requires_grad_() for x in inputs]
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    q, k, v = ours
    mixed = packed_attention(q, k, v, to_device(Segments.of(offsets), device), causal=causal)
    torch.autograd.backward(mixed, gradient.to(device, torch.bfloat16))
    pairs = [(mixed.detach(), output.detach())]
    pairs += [(own.grad, other.grad) for own, other in zip(ours, expected, strict=True)]  # type: ignore[misc]
    least = 0.05 * gradient.norm()
    return max(float((one.float().cpu() - other).norm() / torch.maximum(other.norm(), least)) for one, other in pairs)


def _by_segment(inputs: Sequence[Tensor], lengths: Sequence[int], causal: bool) -> Tensor:
    outputs = []
    for parts in zip(*(torch.split(x, list(lengths)) for x in inputs), strict=True):
        one, other, values = (part.transpose(0, 1)[None] for part in parts)
        mixed = functional.scaled_dot_product_attention(one, other, values, is_causal=causal, enable_gqa=True)
        outputs.append(mixed[0].transpose(0, 1))
    return torch.cat(outputs)
