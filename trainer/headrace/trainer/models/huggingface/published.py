"""Whole published models: an encoder of images or recordings, its own projector and the llm, from one folder.

Their units run like the compact model's, in one process or cut into the stages of a pipeline. What a family does not have, such
as an encoder of recordings, is a module without weights that refuses samples which need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import transformers

from headrace.errors import UserError
from headrace.model_shape import ModelShape, TransformerShape
from headrace.spec import AudioSpec, ImageSpec
from headrace.trainer.models.absent_units import NoAudio, NoProjector, NoVision
from headrace.trainer.models.audio_encoder import AudioEncoder
from headrace.trainer.models.huggingface.intern_vision import intern_vision
from headrace.trainer.models.huggingface.llava_vision import llava_layers, llava_vision
from headrace.trainer.models.huggingface.llm import AdaptedDecoder, decoder_shape
from headrace.trainer.models.huggingface.onevision import onevision, onevision_layers
from headrace.trainer.models.huggingface.parts import WHOLE, Published, read_config, skeleton
from headrace.trainer.models.huggingface.qwen_audio import qwen_audio
from headrace.trainer.models.huggingface.qwen_vision import QwenMerger, QwenVision
from headrace.trainer.models.huggingface.safetensors_reader import Layout
from headrace.trainer.models.huggingface.vision_tower import check_merge, check_patch, shape_of_tower
from headrace.trainer.models.huggingface.whisper import shape_of_encoder
from headrace.trainer.models.multimodal import MultimodalModel
from headrace.trainer.models.projector import Projector
from headrace.trainer.models.vision_encoder import VisionEncoder

Vision = tuple[VisionEncoder, Projector]
Audio = tuple[AudioEncoder, Projector]

_NAMED_AS_QWEN: tuple[Layout, ...] = ({"model.language_model.": "model.", "model.visual.": "visual."}, {})
_OLD: Layout = {
    "lm_head.": "language_model.lm_head.",
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.audio_tower.": "audio_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.image_newline": "image_newline",
}
_NAMED_AS_LLAVA: tuple[Layout, ...] = (
    _OLD,
    {**_OLD, "model.vision_tower.": "vision_tower.vision_model."},
    {},
    {"model.vision_tower.": "model.vision_tower.vision_model."},
)


class _Family(NamedTuple):
    """How the models of one `model_type` are built."""

    architecture: str
    """Name of the class in `transformers`."""
    layouts: Sequence[Layout]
    vision: Callable[[Published, ImageSpec], Vision] | None = None
    audio: Callable[[Published, AudioSpec], Audio] | None = None


def _qwen(whole: Published, image: ImageSpec) -> Vision:
    config = whole.config.vision_config
    check_patch(whole.path, config, image)
    check_merge(whole.path, config.spatial_merge_size, image)
    tower = whole.model.model.visual
    return QwenVision(tower, whole.path, whole), QwenMerger(tower, whole.path, whole)


_FAMILIES = {
    "qwen2_vl": _Family("Qwen2VLForConditionalGeneration", _NAMED_AS_QWEN, vision=_qwen),
    "qwen2_5_vl": _Family("Qwen2_5_VLForConditionalGeneration", _NAMED_AS_QWEN, vision=_qwen),
    "llava": _Family("LlavaForConditionalGeneration", _NAMED_AS_LLAVA, vision=llava_vision),
    "llava_onevision": _Family("LlavaOnevisionForConditionalGeneration", _NAMED_AS_LLAVA, vision=onevision),
    "internvl": _Family("InternVLForConditionalGeneration", _NAMED_AS_LLAVA, vision=intern_vision),
    "qwen2_audio": _Family("Qwen2AudioForConditionalGeneration", _NAMED_AS_LLAVA, audio=qwen_audio),
}


def published_model(
    path: Path, *, vocab_size: int, image: ImageSpec, audio: AudioSpec, image_token_id: int, audio_token_id: int
) -> MultimodalModel:
    """Build the model in the folder at `path` on the meta device, for `adapted.initialise` to load, whole or in stages.

    vocab_size, image_token_id, audio_token_id: of the job's tokenizer. Raises UserError where the model is of no supported
    family, or does not fit the job.
    """
    family = _family(path)
    config = read_config(path)
    if image.fit == "anyres" and config.model_type != "llava_onevision":
        raise UserError(f"the job's image.fit is anyres, and the model in {path} makes a token of each patch: set another fit")
    _check_placeholder(path, "image", getattr(config, "image_token_id", None), image_token_id)
    _check_placeholder(path, "audio", getattr(config, "audio_token_id", None), audio_token_id)
    make = getattr(transformers, family.architecture)._from_config
    model = skeleton(make, config)
    names = frozenset(name for name, _ in model.named_parameters())
    whole = Published(path=path, model=model, layouts=family.layouts, names=names)
    decoder = AdaptedDecoder(path, vocab_size=vocab_size, whole=whole)
    vision: Vision = (NoVision(f"the model in {path}"), NoProjector()) if family.vision is None else family.vision(whole, image)
    recordings: Audio = (NoAudio(f"the model in {path}"), NoProjector()) if family.audio is None else family.audio(whole, audio)
    return MultimodalModel.of(
        vision=vision,
        audio=recordings,
        decoder=decoder,
        image_token_id=image_token_id if family.vision is not None else -1,
        audio_token_id=audio_token_id if family.audio is not None else -1,
    )


def published_shape(path: Path) -> ModelShape:
    """Return the sizes of the model in the folder at `path`; an encoder that it does not have, has no layers."""
    family, config = _family(path), read_config(path)
    vision = audio = TransformerShape(layers=0, width=1, heads=1, kv_heads=1, mlp=1, gated=False)
    if family.vision is not None:
        vision = shape_of_tower(config.vision_config)
    if config.model_type == "llava":
        vision = replace(vision, layers=llava_layers(config))
    if config.model_type == "llava_onevision":
        vision = replace(vision, layers=onevision_layers(config))
    if family.audio is not None:
        audio = shape_of_encoder(config.audio_config)
    return ModelShape(vision=vision, audio=audio, llm=decoder_shape(path, is_whole=True))


def _family(path: Path) -> _Family:
    config = read_config(path)
    if config.model_type not in WHOLE:
        raise UserError(
            f"the model in {path} is a {config.model_type!r}; a whole model is one of {', '.join(WHOLE)}: "
            "name a part of it as vision, audio or llm"
        )
    return _FAMILIES[config.model_type]


def _check_placeholder(path: Path, kind: str, of_model: int | None, of_job: int) -> None:
    if of_model is not None and of_job >= 0 and of_model != of_job:
        raise UserError(
            f"the job's token of {kind} placeholders is {of_job}, and that of the model in {path} is {of_model} "
            f"({kind}_token_id): set the job's text.tokenizer to the tokenizer.json of the model, and its text.template"
        )
