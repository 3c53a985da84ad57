"""LLM decoders of `transformers` on packed samples: Llama, Qwen2 and 2.5, Qwen3, Mistral."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from headrace.errors import UserError
from headrace.model_shape import TransformerShape
from headrace.spec import JobSpec
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.models.attention import Segments
from headrace.trainer.models.decoder import Decoder
from headrace.trainer.models.huggingface.packed_layer import PACKED, PackedLayer
from headrace.trainer.models.huggingface.parts import Adapted, PerDevice, Published, check_dropout, read_config, skeleton

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
"""Supported values of a configuration's `model_type`; Qwen2.5 has qwen2."""
_WITH_MROPE = ("qwen2_vl_text", "qwen2_5_vl_text")
"""The same of decoders that are published as parts of a whole model only."""
_BY_LENGTH = ("dynamic", "longrope")
"""Unsupported kinds of rotary positions: their frequencies depend on the length of the sequence."""


class AdaptedDecoder(Adapted, Decoder):
    """A decoder of `transformers`, used like `headrace.trainer.models.decoder.Decoder`: (T, width) -> (T, width)."""

    def __init__(self, path: Path, *, vocab_size: int, whole: Published | None = None) -> None:
        """`vocab_size`: that of the job's tokenizer. `whole`: the published model at `path` that the decoder is a part of.

        Raises UserError if the vocabulary exceeds the model's, or the model cannot run on packed samples.
        """
        nn.Module.__init__(self)
        config = _config(path, is_whole=whole is not None)
        if vocab_size > config.vocab_size:
            raise UserError(
                f"the job's tokenizer has {vocab_size} tokens, but the model in {path} embeds {config.vocab_size}: "
                "set the job's text.tokenizer to the tokenizer.json of the model"
            )
        model = whole.model if whole else skeleton(AutoModelForCausalLM.from_config, config)
        self._take(model, model.model.language_model if whole else model.model, config)
        self.adopt(model.model.language_model, path, whole) if whole else self.adopt(model, path)

    @classmethod
    def of_model(cls, model: PreTrainedModel) -> AdaptedDecoder:
        """Return the decoder of a model of FAMILIES in memory, whose modules and weights it shares.

        The model's attention is PACKED from then on. Raises UserError if the model cannot run on packed samples.
        """
        path = Path(model.name_or_path or type(model).__name__)
        check_dropout(model.config.to_dict())
        decoder = cls.__new__(cls)
        nn.Module.__init__(decoder)
        decoder._take(model, model.model, _checked(model.config, path))
        decoder.adopt(model, path)
        model.set_attn_implementation(PACKED)
        return decoder

    def _take(self, model: Any, trunk: Any, config: Any) -> None:
        self.config = config
        self.width = config.hidden_size
        self.embed = trunk.embed_tokens
        self.layers = nn.ModuleList(PackedLayer(layer) for layer in trunk.layers)
        self.norm = trunk.norm
        self.head = None if getattr(model.config, "tie_word_embeddings", False) else model.lm_head
        self.tied_names = ("lm_head.weight",) if self.head is None else ()
        self._rotary = PerDevice(type(trunk.rotary_emb), trunk.config)
        self.is_mrope = _is_mrope(config)
        """Whether tokens have positions in time, height and width (M-RoPE)."""

    def positions(self, microbatch: PackedMicrobatch) -> Tensor:
        """Return the positions of the tokens: (T,), or (3, T) with M-RoPE.

        Raises UserError where the model has M-RoPE, and the microbatch comes from a job without it.
        """
        if not self.is_mrope:
            return microbatch.position_ids
        if microbatch.mrope_position_ids.shape[1] != len(microbatch.input_ids):
            raise UserError(f"the model in {self._path} takes positions in time, height and width: set mrope: true in the job")
        return microbatch.mrope_position_ids

    def layer_args(self, position_ids: Tensor, segments: Segments) -> tuple[Any, ...]:
        """Return what every layer takes besides its hidden states: the samples' segments and rotary angles."""
        like = torch.empty(0, device=position_ids.device)
        rows = position_ids[:, None] if self.is_mrope else position_ids[None]
        return segments, self._rotary.on(position_ids.device)(like, rows)


def check_positions(path: Path, spec: JobSpec) -> None:
    """Raise UserError where the whole model at `path` has M-RoPE, whose positions the job does not make."""
    if _is_mrope(_config(path, is_whole=True)) and not spec.mrope:
        raise UserError(f"the model in {path} takes positions in time, height and width: set mrope: true in the job")


def _is_mrope(config: Any) -> bool:
    return "mrope_section" in config.rope_parameters


def decoder_shape(path: Path, *, is_whole: bool = False) -> TransformerShape:
    """Return the sizes of the decoder in the model at `path`, a whole one or an llm. Raises UserError for an unsupported one."""
    return shape_of_decoder(_config(path, is_whole=is_whole))


def shape_of_decoder(config: Any) -> TransformerShape:
    """Return the sizes of the decoder with this configuration of `transformers`."""
    return TransformerShape(
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        mlp=config.intermediate_size,
        gated=True,
        vocab=config.vocab_size,
    )


def _config(path: Path, *, is_whole: bool) -> Any:
    config = read_config(path).get_text_config(decoder=True) if is_whole else read_config(path)
    supported = (*FAMILIES, *_WITH_MROPE) if is_whole else FAMILIES
    if config.model_type not in supported:
        inside = "the llm of the model" if is_whole else "the model"
        raise UserError(f"{inside} in {path} is a {config.model_type!r}; an llm is one of {', '.join(FAMILIES)}")
    return _checked(config, path)


def _checked(config: Any, path: Path) -> Any:
    """Return a decoder's configuration. Raises UserError for rotary positions that cannot be packed."""
    kind = config.rope_parameters["rope_type"]
    if kind in _BY_LENGTH:
        raise UserError(
            f"the rotary positions of the model in {path} are {kind!r}, which depend on a sample's length and so cannot be "
            "packed: set rope_type to default, linear, yarn or llama3 in its config.json"
        )
    return config
