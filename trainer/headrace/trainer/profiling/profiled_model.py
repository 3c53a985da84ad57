"""The model that is profiled: a named shape, perhaps with units of `transformers`, and the settings of the job it is for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import torch

from headrace import limits
from headrace.errors import UserError
from headrace.model_shape import MODEL_SHAPES, ModelShape
from headrace.plan import GENERATOR, LLM
from headrace.spec import AudioSpec, ImageSpec
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.models.adapted_units import HuggingFaceUnits
from headrace.trainer.models.audio_encoder import STRIDE
from headrace.trainer.models.multimodal import MultimodalModel
from headrace.trainer.pipeline.slice_width import check_width
from headrace.trainer.profiling.profiled_batch import BatchShape, profiled_batch

_IMAGE_TOKEN, _AUDIO_TOKEN = 0, 1
DEFAULT_VOCABULARY = 32_000
"""Size of the vocabulary where the model's shape has none of its own."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProfiledModel:
    """A model on the meta device, with what of a job's settings its times depend on."""

    model: MultimodalModel
    shape: ModelShape
    image: ImageSpec
    audio: AudioSpec
    vocab_size: int

    def most_positions(self, part: str) -> int:
        """Return the most positions that one sample, image or recording of such a job has in a part."""
        patches = self.image.max_pixels // self.image.patch**2
        generated = patches // self.image.merge**2
        return {"vision": patches, GENERATOR: generated, "audio": self.audio.most_frames // STRIDE}.get(part, limits.MAX_TOKENS)

    def batch(self, shape: BatchShape) -> PackedMicrobatch:
        """Return a microbatch of these segments for the model, with random content, on the host."""
        token_ids = (max(self.model.image_token_id, self.model.audio_token_id) + 1, self.vocab_size)
        return profiled_batch(shape, image=self.image, audio=self.audio, token_ids=token_ids)

    def check_widths(self, parts: Iterable[str], widths: Iterable[int]) -> None:
        """Raise UserError for a tensor-parallel width that does not divide the heads or the MLP of one of the parts."""
        for part, width in product(parts, widths):
            check_width(part, self.shape.units[part], width)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the model's parts."""
        return ("vision", "audio", LLM) + ((GENERATOR,) if self.model.generator is not None else ())


def profiled_model(
    name: str, units: HuggingFaceUnits, *, image: ImageSpec, audio: AudioSpec, vocab_size: int | None = None
) -> ProfiledModel:
    """Build a named model, with `units` in place of some of its own, on the meta device.

    vocab_size: None takes the published one of the shape, or else DEFAULT_VOCABULARY. Raises UserError where the name is unknown,
    a unit cannot be read or does not fit `image` and `audio`, or `transformers` is missing.
    """
    if name not in MODEL_SHAPES:
        raise UserError(f"no model {name!r}; there are {', '.join(MODEL_SHAPES)}")
    shape = MODEL_SHAPES[name]
    if units == HuggingFaceUnits():
        vocabulary = vocab_size or shape.llm.vocab or DEFAULT_VOCABULARY
        with torch.device("meta"):
            model = MultimodalModel(
                shape,
                vocab_size=vocabulary,
                image=image,
                audio=audio,
                image_token_id=_IMAGE_TOKEN,
                audio_token_id=_AUDIO_TOKEN,
            )
        return ProfiledModel(model=model, shape=shape, image=image, audio=audio, vocab_size=vocabulary)
    try:
        from headrace.trainer.models.huggingface import model as adapted
    except ImportError as err:
        raise UserError(f"a Hugging Face model needs transformers, which is not here ({err}): pip install transformers") from err
    adapted_shape = adapted.adapted_shape(units, shape)
    vocabulary = vocab_size or adapted_shape.llm.vocab or DEFAULT_VOCABULARY
    model = adapted.adapted_model(
        units,
        shape,
        vocab_size=vocabulary,
        image=image,
        audio=audio,
        image_token_id=_IMAGE_TOKEN,
        audio_token_id=_AUDIO_TOKEN,
    )
    return ProfiledModel(model=model, shape=adapted_shape, image=image, audio=audio, vocab_size=vocabulary)
