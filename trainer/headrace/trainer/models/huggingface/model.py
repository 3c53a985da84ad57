"""The whole multimodal model with units of `transformers` in place of some of the compact ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from headrace.model_shape import ModelShape
from headrace.spec import AudioSpec, ImageSpec
from headrace.trainer.models import multimodal
from headrace.trainer.models.adapted_units import HuggingFaceUnits
from headrace.trainer.models.audio_encoder import STRIDE
from headrace.trainer.models.huggingface.clip import ClipVision
from headrace.trainer.models.huggingface.llm import AdaptedDecoder, decoder_shape
from headrace.trainer.models.huggingface.onevision import images_of
from headrace.trainer.models.huggingface.parts import Adapted, read_config
from headrace.trainer.models.huggingface.published import published_model, published_shape
from headrace.trainer.models.huggingface.qwen_vision import qwen_vision
from headrace.trainer.models.huggingface.safetensors_reader import has_weights
from headrace.trainer.models.huggingface.vision_tower import patch_side, vision_config, vision_shape
from headrace.trainer.models.huggingface.whisper import WhisperAudio, audio_shape
from headrace.trainer.models.multimodal import MultimodalModel


def adapted_shape(units: HuggingFaceUnits, shape: ModelShape) -> ModelShape:
    """Return `shape` with the sizes of the given units in place of its own.

    Raises UserError for a path without a configuration, or with that of an unsupported model.
    """
    if units.whole is not None:
        return published_shape(units.whole)
    return replace(
        shape,
        vision=shape.vision if units.vision is None else vision_shape(units.vision),
        audio=shape.audio if units.audio is None else audio_shape(units.audio),
        llm=shape.llm if units.llm is None else decoder_shape(units.llm),
    )


def own_settings(units: HuggingFaceUnits) -> tuple[ImageSpec, AudioSpec]:
    """Return settings of a job's images and recordings that fit the models, such as the size of patches."""
    image, audio = ImageSpec(), AudioSpec(max_seconds=30)
    vision_path, audio_path = units.whole or units.vision, units.whole or units.audio
    vision = None if vision_path is None else read_config(vision_path)
    if vision is not None:
        config = getattr(vision, "vision_config", vision)
        if hasattr(config, "patch_size"):
            merge = getattr(config, "spatial_merge_size", round(1 / getattr(vision, "downsample_ratio", 1)))
            of_tiles = images_of(vision) if vision.model_type == "llava_onevision" else {}
            image = image.model_copy(update={"patch": patch_side(config), "merge": merge, **of_tiles})
    if audio_path is not None:
        config = read_config(audio_path)
        config = getattr(config, "audio_config", config)
        if hasattr(config, "num_mel_bins"):
            drops = {} if config.model_type == "whisper" else {"frames_per_token": 4, "last_token": "drop"}
            positions = {"max_seconds": config.max_source_positions * STRIDE * audio.hop_s}
            audio = audio.model_copy(update={"mel_bins": config.num_mel_bins, **positions, **drops})
    return image, audio


def pretrained(units: HuggingFaceUnits) -> list[Path]:
    """Return those paths of these units that hold pretrained weights and not only a configuration."""
    paths = (units.whole, units.vision, units.audio, units.llm)
    return [path for path in paths if path is not None and has_weights(path)]


def adapted_model(
    units: HuggingFaceUnits,
    shape: ModelShape,
    *,
    vocab_size: int,
    image: ImageSpec,
    audio: AudioSpec,
    image_token_id: int,
    audio_token_id: int,
    seed: int = 0,
) -> MultimodalModel:
    """Build the model on the meta device, for `stages.build_stages` to cut stages from, or for `to_empty` and `initialise`.

    shape: sizes of the units that stay the compact model's. All other arguments: see `MultimodalModel`. Projectors are the
    compact model's, except Qwen-VL's own if its output is as wide as the LLM, and those of a whole model. Raises UserError where
    a unit does not fit the job or cannot run on packed sequences.
    """
    if units.whole is not None:
        return published_model(
            units.whole,
            vocab_size=vocab_size,
            image=image,
            audio=audio,
            image_token_id=image_token_id,
            audio_token_id=audio_token_id,
        )
    shape = adapted_shape(units, shape)
    with torch.device("meta"):
        model = MultimodalModel(
            shape,
            vocab_size=vocab_size,
            image=image,
            audio=audio,
            image_token_id=image_token_id,
            audio_token_id=audio_token_id,
            seed=seed,
        )
    if units.vision is not None:
        _adapt_vision(model, units.vision, image, token_width=shape.llm.width)
    if units.audio is not None:
        model.audio = WhisperAudio(units.audio, audio)
    if units.llm is not None:
        model.decoder = AdaptedDecoder(units.llm, vocab_size=vocab_size)
    return model


def initialise(model: MultimodalModel, seed: int) -> None:
    """Set the weights of the whole model, or of a stage's part of it.

    `Adapted.initialise` does so for each unit of `transformers`, `headrace.trainer.models.multimodal.initialise` for the rest.
    """
    adapted = {name: child for name, child in model.named_children() if isinstance(child, Adapted)}
    _place(model, dict.fromkeys(adapted))
    multimodal.initialise(model, seed)
    _place(model, adapted)
    for name, unit in adapted.items():
        unit.initialise(name, seed)


def _adapt_vision(model: MultimodalModel, path: Path, image: ImageSpec, *, token_width: int) -> None:
    if vision_config(path).model_type in ("qwen2_vl_vision", "qwen2_5_vl_vision"):
        model.vision, merger = qwen_vision(path, image, token_width=token_width)
        model.vision_projector = merger or model.vision_projector
    else:
        model.vision = ClipVision(path, image)


def _place(model: nn.Module, children: dict[str, Adapted] | dict[str, None]) -> None:
    for name, child in children.items():
        model.register_module(name, child)
