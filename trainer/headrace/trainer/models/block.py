"""The pre-norm transformer block that encoders, decoder and generator are stacks of."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.model_shape import TransformerShape
from headrace.trainer.models.attention import Segments, packed_attention
from headrace.trainer.models.fused_linear import FusedLinear, takes_parts
from headrace.trainer.models.rotary import Rotation

NormFactory = Callable[[int], nn.Module]


class SelfAttention(nn.Module):
    """Rotary self-attention with grouped queries: (T, width) -> (T, width)."""

    def __init__(self, shape: TransformerShape, *, causal: bool, bias: bool) -> None:
        super().__init__()
        self.causal = causal
        self.head_dim = shape.width // shape.heads
        of_keys = shape.kv_heads * self.head_dim
        self.qkv = FusedLinear(shape.width, {"query": shape.width, "key": of_keys, "value": of_keys}, bias=bias)
        self.out = nn.Linear(shape.width, shape.width, bias=bias)
        takes_parts(self)

    def forward(self, x: Tensor, rotation: Rotation, segments: Segments) -> Tensor:
        """Attend inside each of the segments; `rotation` has the angles of the tokens in x."""
        output: Tensor = self.out(self.mix(self.qkv(x), rotation, segments))
        return output

    def mix(self, product: Tensor, rotation: Rotation, segments: Segments) -> Tensor:
        """Return what `out` takes, (T, heads * head_dim), from the product of `qkv` (T, (heads + 2 * kv_heads) * head_dim)."""
        heads, kv_heads, _ = (outputs // self.head_dim for outputs in self.qkv.parts.values())
        of_heads: Tensor = product.unflatten(-1, (-1, self.head_dim))  # type: ignore[no-untyped-call]
        turned, v = of_heads.split_with_sizes([heads + kv_heads, kv_heads], dim=1)
        q, k = rotation.apply(turned).split_with_sizes([heads, kv_heads], dim=1)
        v = v.contiguous()  # a view would keep queries and keys as they were before the rotation
        return packed_attention(q, k, v, segments, causal=self.causal).flatten(1)


class Mlp(nn.Module):
    """MLP with GELU, or with SwiGLU (Shazeer 2020, equation 6) if the shape is gated: (T, width) -> (T, width)."""

    def __init__(self, shape: TransformerShape, *, bias: bool) -> None:
        super().__init__()
        self.gated = shape.gated
        if shape.gated:
            self.gate_up = FusedLinear(shape.width, {"gate": shape.mlp, "up": shape.mlp}, bias=bias)
        else:
            self.up = nn.Linear(shape.width, shape.mlp, bias=bias)
        self.out = nn.Linear(shape.mlp, shape.width, bias=bias)
        takes_parts(self)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to each row."""
        output: Tensor = self.out(self.activate(self.entry(x)))
        return output

    @property
    def entry(self) -> nn.Linear:
        """The matrix that takes x, whose product `activate` takes."""
        return self.gate_up if self.gated else self.up

    def activate(self, product: Tensor) -> Tensor:
        """Return what `out` takes, (T, mlp), from the product of `entry`, (T, 2 * mlp) or (T, mlp)."""
        if not self.gated:
            return functional.gelu(product)
        gate, up = product.chunk(2, dim=-1)
        return functional.silu(gate) * up


class Block(nn.Module):
    """Pre-norm transformer block, attention and MLP with residual connections: (T, width) -> (T, width)."""

    def __init__(self, shape: TransformerShape, *, norm: NormFactory, causal: bool, bias: bool) -> None:
        super().__init__()
        self.attention_norm = norm(shape.width)
        self.attention = SelfAttention(shape, causal=causal, bias=bias)
        self.mlp_norm = norm(shape.width)
        self.mlp = Mlp(shape, bias=bias)

    def forward(self, x: Tensor, rotation: Rotation, segments: Segments) -> Tensor:
        """Apply the block to a packed sequence with these rotary angles and segments."""
        x = x + self.attention(self.attention_norm(x), rotation, segments)
        output: Tensor = x + self.mlp(self.mlp_norm(x))
        return output


def cast_once(x: Tensor) -> Tensor:
    """Return x in autocast's dtype where autocast is on: each of several matrices that take x would cast and keep it anew."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def encoder_blocks(shape: TransformerShape) -> nn.ModuleList:
    """Return the blocks of a ViT: LayerNorm, biases, and attention from every token to its whole segment."""
    return nn.ModuleList(Block(shape, norm=layer_norm, causal=False, bias=True) for _ in range(shape.layers))


def decoder_blocks(shape: TransformerShape) -> nn.ModuleList:
    """Return the blocks of a Llama: RMSNorm, no biases, causal attention."""
    return nn.ModuleList(Block(shape, norm=rms_norm, causal=True, bias=False) for _ in range(shape.layers))


def rms_norm(width: int) -> nn.Module:
    """Return an RMSNorm (Zhang and Sennrich 2019) with the epsilon of Llama 3, for a residual stream of any dtype."""
    return _RmsNorm(width, eps=1e-5)


def layer_norm(width: int) -> nn.Module:
    """Return a LayerNorm (Ba et al. 2016) for a residual stream of any dtype."""
    return _LayerNorm(width)


class _RmsNorm(nn.RMSNorm):
    """An RMSNorm whose output has the dtype of its input.

    Autocast would keep a float32 copy of a stream in half precision, and float32 weights beside it would rule out torch's fused
    kernel. That kernel computes in float32 in any case.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            return functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class _LayerNorm(nn.LayerNorm):
    """A LayerNorm whose output has the dtype of its input; see `_RmsNorm`."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)
