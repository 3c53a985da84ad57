"""LLM decoders of `transformers` on packed samples: Llama, Qwen2 and 2.5, Qwen3, Mistral."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from headrace.errors import UserError
from headrace.model_shape import TransformerShape
from headrace.trainer.models.attention import Segments
from headrace.trainer.models.decoder import Decoder
from headrace.trainer.models.huggingface.packed_layer import PackedLayer
from headrace.trainer.models.huggingface.parts import Adapted, PerDevice, read_config, skeleton

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
"""Supported values of a configuration's `model_type`; Qwen2.5 has qwen2."""
_BY_LENGTH = ("dynamic", "longrope")
"""Unsupported kinds of rotary positions: their frequencies depend on the length of the sequence."""


class AdaptedDecoder(Adapted, Decoder):
    """A decoder of `transformers`, used like `headrace.trainer.models.decoder.Decoder`: (T, width) -> (T, width)."""

    def __init__(self, path: Path, *, vocab_size: int) -> None:
        """`vocab_size`: that of the job's tokenizer.

        Raises UserError if it exceeds the model's, or the model cannot run on packed samples.
        """
        nn.Module.__init__(self)
        config = _config(path)
        if vocab_size > config.vocab_size:
            raise UserError(
                f"the job's tokenizer has {vocab_size} tokens, but the model in {path} embeds {config.vocab_size}: "
                "set the job's text.tokenizer to the tokenizer.json of the model"
            )
        model = skeleton(AutoModelForCausalLM.from_config, config)
        self.width = config.hidden_size
        self.embed = model.model.embed_tokens
        self.layers = nn.ModuleList(PackedLayer(layer) for layer in model.model.layers)
        self.norm = model.model.norm
        self.head = None if config.tie_word_embeddings else model.lm_head
        self._rotary = PerDevice(type(model.model.rotary_emb), model.config)
        self.adopt(model, path)

    def layer_args(self, position_ids: Tensor, segments: Segments) -> tuple[Any, ...]:
        """Return what every layer takes besides its hidden states: the samples' segments and rotary angles."""
        like = torch.empty(0, device=position_ids.device)
        return segments, self._rotary.on(position_ids.device)(like, position_ids[None])


def decoder_shape(path: Path) -> TransformerShape:
    """Return the sizes of the decoder in the model at `path`. Raises UserError for an unsupported model."""
    config = _config(path)
    return TransformerShape(
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        mlp=config.intermediate_size,
        gated=True,
        vocab=config.vocab_size,
    )


def _config(path: Path) -> Any:
    config = read_config(path)
    if config.model_type not in FAMILIES:
        raise UserError(f"the model in {path} is a {config.model_type!r}; an llm is one of {', '.join(FAMILIES)}")
    kind = config.rope_parameters["rope_type"]
    if kind in _BY_LENGTH:
        raise UserError(
            f"the rotary positions of the model in {path} are {kind!r}, which depend on a sample's length and so cannot be "
            "packed: set rope_type to default, linear, yarn or llama3 in its config.json"
        )
    return config
