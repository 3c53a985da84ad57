"""A Llama-style decoder on packed samples (Touvron et al. 2023, section 2.2; grouped queries as in Llama 3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headrace.model_shape import TransformerShape
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.models.attention import Segments
from headrace.trainer.models.block import decoder_blocks, rms_norm
from headrace.trainer.models.dropout import ResidualDropout
from headrace.trainer.models.rotary import rotation

_THETA = 500_000.0  # Llama 3


class Decoder(nn.Module):
    """Causal decoder: embeddings (T, width) -> hidden states (T, width). A token sees those before it in its own sample.

    `forward` includes neither the embedding table `embed` nor the head `output_weight`; with `tied` these are one matrix.
    """

    def __init__(self, shape: TransformerShape, *, vocab_size: int, tied: bool) -> None:
        super().__init__()
        self.width = shape.width
        self.head_dim = shape.width // shape.heads
        # initialised later: torch's own initialisation on the meta device would cost every process seconds of imports
        self.embed = nn.Embedding(vocab_size, shape.width, _weight=torch.empty(vocab_size, shape.width))
        self.layers = decoder_blocks(shape)
        self.norm = rms_norm(shape.width)
        self.head = None if tied else nn.Linear(shape.width, vocab_size, bias=False)

    dropout: ResidualDropout | None = None
    """What drops values in the layers; None: nothing."""

    def forward(self, embeddings: Tensor, position_ids: Tensor, segments: Segments, dropout_keys: Tensor | None = None) -> Tensor:
        """Return the normed hidden states. `position_ids` (of `positions`) and `segments`, one a sample, are on the device."""
        x = embeddings
        layer_args = self.layer_args(position_ids, segments)
        for layer in self.layers:
            run = layer if self.dropout is None else self.dropout.with_keys(layer, dropout_keys)
            x = run(x, *layer_args)
        output: Tensor = self.norm(x)
        return output

    def dropout_keys(self, microbatch: PackedMicrobatch) -> Tensor | None:
        """Return the keys that dropout draws by for the tokens, (T,) on the host; None without dropout."""
        return None if self.dropout is None else self.dropout.keys(microbatch)

    def positions(self, microbatch: PackedMicrobatch) -> Tensor:
        """Return the positions of the tokens that `layer_args` takes: (T,)."""
        return microbatch.position_ids

    def layer_args(self, position_ids: Tensor, segments: Segments) -> tuple[Any, ...]:
        """Return what every layer takes besides its hidden states: rotary angles and segments, one per sample.

        `position_ids`: from `positions`, on the device.
        """
        return rotation(position_ids[:, None], self.head_dim, theta=_THETA), segments

    @property
    def output_weight(self) -> Tensor:
        """(vocab_size, width) weight of the head: hidden states times its transpose are the logits."""
        return self.embed.weight if self.head is None else self.head.weight
