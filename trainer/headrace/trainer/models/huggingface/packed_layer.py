"""The attention that layers of `transformers` call here, and the layer that makes a packed sequence a batch of one for them."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from headrace.errors import UserError
from headrace.trainer.models.attention import Segments, packed_attention

PACKED = "headrace_packed"
"""The name under which `transformers` knows it, as `attn_implementation`."""

Rotations = tuple[Tensor, Tensor]
"""Cosine and sine as the layers of `transformers` take them: each (..., T, head_dim)."""


class PackedLayer(nn.Module):
    """A layer of `transformers` on a packed sequence: (T, width) -> (T, width); a token sees its own segment only."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, segments: Segments, rotations: Rotations | None = None) -> Tensor:
        """The segments go through the layer as its mask. `rotations`: (1, T, head_dim), for layers that turn queries and keys."""
        turned = {} if rotations is None else {"position_embeddings": rotations}
        output: Tensor = self.layer(x[None], attention_mask=segments, **turned)
        return output[0]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Segments | None,
    *,
    scaling: float,
    segments: Segments | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query (1, H, T, D), key and value (1, H_kv, T, D) -> (1, T, H, D).

    The segments are the mask or, of a layer that hands no mask on, an argument of their own. Under autocast, what was turned is
    float32 and comes back to the values' dtype.
    """
    segments = attention_mask if segments is None else segments
    assert segments is not None
    longest = max(segments.lengths, default=0)
    if sliding_window is not None and longest > sliding_window:
        raise UserError(
            f"a sample has {longest} tokens, but the model's attention reaches back {sliding_window} (its sliding_window), which "
            f"packed attention does not do: set the job's text.max_tokens to {sliding_window} or less"
        )
    head_dim = query.shape[-1]
    if not math.isclose(scaling, head_dim**-0.5):
        query = query * (scaling * head_dim**0.5)
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    return packed_attention(q, k, v, segments, causal=bool(module.is_causal))[None], None


AttentionInterface.register(PACKED, _attend)
