"""Layers of `transformers` on packed sequences: an attention function for them, and a wrapper that passes a batch of one."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from headrace.errors import UserError
from headrace.trainer.models.attention import Segments, packed_attention

PACKED = "headrace_packed"
"""Name under which packed attention is registered in `transformers`, for `attn_implementation`."""

Rotations = tuple[Tensor, Tensor]
"""Rotary cosine and sine in the form that layers of `transformers` take: each (..., T, head_dim)."""


class PackedLayer(nn.Module):
    """A layer of `transformers` on a packed sequence: (T, width) -> (T, width); a token sees its own segment only."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, segments: Segments, rotations: Rotations | None = None) -> Tensor:
        """Run the layer with `segments` as its mask. `rotations`: each (1, T, head_dim), for layers with rotary positions."""
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
    """Packed attention for layers of `transformers`: query (1, H, T, D), key and value (1, H_kv, T, D) -> (1, T, H, D).

    The segments arrive as the attention mask or, from layers that do not pass a mask on, as an argument of their own. Under
    autocast rotated queries and keys are float32; they are cast to the values' dtype. Raises UserError where a segment is longer
    than the layer's sliding window.
    """
    segments = attention_mask if segments is None else segments
    assert segments is not None
    longest = segments.longest
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
