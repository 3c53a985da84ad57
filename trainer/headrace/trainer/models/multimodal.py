"""The whole multimodal model: encoders and projectors fill the placeholder rows of the decoder's input.

A generator, if there is one, learns to make the same images from the decoder's output at their placeholders.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from headrace.errors import HeadraceError, UserError
from headrace.model_shape import MODEL_SHAPES, ModelShape
from headrace.spec import AudioSpec, ImageSpec, JobSpec
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.loading.device_copy import to_device
from headrace.trainer.models.attention import Segments
from headrace.trainer.models.audio_encoder import STRIDE, AudioEncoder, encoder_frames
from headrace.trainer.models.decoder import Decoder
from headrace.trainer.models.fused_linear import parts
from headrace.trainer.models.generator import Generator
from headrace.trainer.models.loss import StepLoss, Targets, token_loss
from headrace.trainer.models.projector import Groups, Projector
from headrace.trainer.models.vision_encoder import VisionEncoder

# Llama-3.2-1B and 3B and Qwen2.5-3B (width 3072 at most) tie embedding and head; Qwen2.5-7B and Llama-3-8B do not.
_WIDEST_TIED = 3072
_INIT_STD = 0.02  # GPT-2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageInputs:
    """What the image tokens of a microbatch are made of."""

    patches: Tensor
    """(P, 3 * patch * patch) uint8."""
    layout: Any
    """From `VisionEncoder.layout`."""
    groups: Any
    """From `Projector.image_groups`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AudioInputs:
    """What the audio tokens of a microbatch are made of."""

    mel: Tensor
    """(F, bins) float16."""
    convolutions: Any
    """From `AudioEncoder.convolutions`."""
    layout: Any
    """From `AudioEncoder.layout`."""
    groups: Groups
    """Encoder frames that become one token."""


class MultimodalModel(nn.Module):
    """Maps a PackedMicrobatch to its loss: encoders, projectors, decoder, generator, which are independent modules."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        vocab_size: int,
        image: ImageSpec,
        audio: AudioSpec,
        image_token_id: int,
        audio_token_id: int,
        seed: int = 0,
    ) -> None:
        """`seed`: the job's, for what a generator draws. Weights are set later, by `initialise`.

        Raises UserError where a placeholder lies outside of the vocabulary, `audio.frames_per_token` is odd or `audio.last_token`
        is not pad, or `image.fit` is anyres.
        """
        super().__init__()
        if not (0 <= image_token_id < vocab_size and -1 <= audio_token_id < vocab_size):
            raise UserError(
                f"placeholders {image_token_id} and {audio_token_id} must lie in the vocabulary of {vocab_size} tokens"
            )
        if audio.frames_per_token % STRIDE:
            raise UserError(f"audio.frames_per_token ({audio.frames_per_token}) must be a multiple of {STRIDE}: make it even")
        if audio.last_token == "drop":
            raise UserError("audio.last_token is drop, but this model pads the last token of a recording: set it to pad")
        if image.fit == "anyres":
            raise UserError(
                "image.fit is anyres, but this model makes a token of each patch: take a LLaVA-OneVision (model: {whole: PATH})"
            )
        self.image_token_id = image_token_id
        self.audio_token_id = audio_token_id
        width = shape.llm.width
        self.vision = VisionEncoder(shape.vision, image)
        self.vision_projector = Projector(width_in=shape.vision.width, group=image.merge**2, width_out=width)
        self.audio = AudioEncoder(shape.audio, audio)
        self.audio_projector = Projector(width_in=shape.audio.width, group=audio.frames_per_token // STRIDE, width_out=width)
        self.decoder = Decoder(shape.llm, vocab_size=vocab_size, tied=width <= _WIDEST_TIED)
        self.generator: Generator | None = None
        self.generator_projector: Projector | None = None
        if shape.generator is not None:
            self.generator_projector = Projector(width_in=width, group=1, width_out=shape.generator.width)
            self.generator = Generator(shape.generator, image, seed=seed)

    @classmethod
    def of(
        cls,
        *,
        vision: tuple[VisionEncoder, Projector],
        audio: tuple[AudioEncoder, Projector],
        decoder: Decoder,
        image_token_id: int,
        audio_token_id: int,
    ) -> Self:
        """Return the model of these units, each encoder with its projector, without a generator.

        image_token_id, audio_token_id: placeholders in the decoder's input; -1: there are none of the kind.
        """
        model = cls.__new__(cls)
        nn.Module.__init__(model)
        model.image_token_id, model.audio_token_id = image_token_id, audio_token_id
        model.vision, model.vision_projector = vision
        model.audio, model.audio_projector = audio
        model.decoder = decoder
        model.generator = model.generator_projector = None
        return model

    def forward(self, microbatch: PackedMicrobatch) -> StepLoss:
        """Return the summed loss of a microbatch. With a generator every image token is a target too.

        The microbatch is best on the host, where targets and placeholders are found without waiting for the device. Modules
        without input are not called, so their parameters keep a gradient of None. Without any target the loss is a constant 0.
        Raises HeadraceError where placeholders and media tokens differ in number.
        """
        device = self.decoder.output_weight.device
        num_generated = 0 if self.generator is None else self.generator.num_rows(microbatch.image_cu_seqlens)
        if microbatch.num_targets + num_generated == 0:
            return StepLoss(loss_sum=torch.zeros((), device=device), target_weight=0.0)
        embeddings = self.embed(microbatch)
        positions, keys = self.decoder.positions(microbatch), self.decoder.dropout_keys(microbatch)
        found = Targets.of(microbatch.labels, microbatch.target_weights)
        sequence = positions, Segments.of(microbatch.cu_seqlens), found, keys
        position_ids, segments, targets, keys = to_device(sequence, device)
        hidden = self.decoder(embeddings, position_ids, segments, keys)
        loss_sum = token_loss(hidden, targets, self.decoder.output_weight)
        if self.generator is not None and num_generated:
            images = microbatch.patches, self.generator.layout(microbatch), self.placeholders("vision", microbatch.input_ids)
            patches, layout, rows = to_device(images, device)
            loss_sum = loss_sum + self.generator(patches, layout, self.conditions(hidden, rows))
        return StepLoss(loss_sum=loss_sum, target_weight=microbatch.target_weight + num_generated)

    def embed(self, microbatch: PackedMicrobatch) -> Tensor:
        """Return the decoder's input (T, width): token embeddings, with media tokens in place of their placeholders."""
        ids = microbatch.input_ids
        rows = self.placeholders("vision", ids), self.placeholders("audio", ids)
        inputs = ids, rows, self.image_inputs(microbatch), self.audio_inputs(microbatch)
        ids, (image_rows, audio_rows), images, recordings = to_device(inputs, self.decoder.embed.weight.device)
        x: Tensor = self.decoder.embed(ids)
        x = fill_placeholders(x, image_rows, None if images is None else self.image_tokens(images), "image")
        return fill_placeholders(x, audio_rows, None if recordings is None else self.audio_tokens(recordings), "audio")

    def placeholders(self, encoder: str, input_ids: Tensor) -> Tensor:
        """Return the rows (t,) int64 of (T,) input ids where tokens of `encoder`, "vision" or "audio", belong."""
        token = self.image_token_id if encoder == "vision" else self.audio_token_id
        return (input_ids == token).nonzero().squeeze(1)

    def image_inputs(self, microbatch: PackedMicrobatch) -> ImageInputs | None:
        """Return what `image_tokens` takes, with its layout on the host; None without images."""
        if not len(microbatch.patches):
            return None
        return ImageInputs(
            patches=microbatch.patches,
            layout=self.vision.layout(microbatch.image_grids, microbatch.image_cu_seqlens),
            groups=self.vision_projector.image_groups(microbatch),
        )

    def image_tokens(self, images: ImageInputs) -> Tensor:
        """Return the projected tokens (t, LLM's width) of all images in order."""
        tokens: Tensor = self.vision_projector(self.vision(images.patches, images.layout), images.groups)
        return tokens

    def conditions(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Return the generator's conditions (t, its width) for the image tokens at `rows` of the decoder's output (T, width)."""
        assert self.generator_projector is not None, "the model has a generator"
        conditions: Tensor = self.generator_projector(hidden[rows], Groups(num_rows=len(rows), rows=None))
        return conditions

    def audio_inputs(self, microbatch: PackedMicrobatch) -> AudioInputs | None:
        """Return what `audio_tokens` takes, with its layout on the host; None without recordings."""
        if not len(microbatch.mel):
            return None
        return AudioInputs(
            mel=microbatch.mel,
            convolutions=self.audio.convolutions(microbatch.mel_frames),
            layout=self.audio.layout(microbatch.mel_frames),
            groups=self.audio_projector.groups(encoder_frames(microbatch.mel_frames)),
        )

    def audio_tokens(self, recordings: AudioInputs) -> Tensor:
        """Return the projected tokens (t, LLM's width) of all recordings in order."""
        features = self.audio(recordings.mel, recordings.convolutions, recordings.layout)
        tokens: Tensor = self.audio_projector(features, recordings.groups)
        return tokens


def fill_placeholders(x: Tensor, rows: Tensor, tokens: Tensor | None, what: str) -> Tensor:
    """Return x (T, width) with the rows `rows` replaced by `tokens`, in order. Raises HeadraceError if the counts differ."""
    count = 0 if tokens is None else len(tokens)
    if len(rows) != count:
        raise HeadraceError(
            f"the microbatch has {len(rows)} {what} placeholders for {count} {what} tokens: "
            "preprocessor and trainer disagree on the patch grid, the mel frames or the placeholder ids"
        )
    return x if tokens is None else x.index_copy(0, rows, tokens.to(x.dtype))


def build_model(
    shape_name: str,
    spec: JobSpec,
    vocab_size: int,
    image_token_id: int,
    audio_token_id: int,
    seed: int,
    *,
    device: torch.device | str = "cpu",
) -> MultimodalModel:
    """Build the model of a named shape for a job's image and audio settings, and initialise its weights on `device`.

    Equal seeds give equal weights on one kind of device. On the meta device the weights have shapes only. Raises UserError for
    an unknown shape.
    """
    if shape_name not in MODEL_SHAPES:
        raise UserError(f"no model {shape_name!r}; there are {', '.join(MODEL_SHAPES)}")
    with torch.device("meta"):
        model = MultimodalModel(
            MODEL_SHAPES[shape_name],
            vocab_size=vocab_size,
            image=spec.image,
            audio=spec.audio,
            image_token_id=image_token_id,
            audio_token_id=audio_token_id,
            seed=seed,
        )
    if torch.device(device).type != "meta":
        model.to_empty(device=device)
        initialise(model, seed)
    return model


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Initialise the weights as GPT-2 does (Radford et al. 2019, section 2.3).

    Weights are normal with deviation 0.02; those of projections onto the residual stream are divided by the root of the number
    of residual additions in their stack. Biases are 0, norms start as identities. Every matrix, fused or not, draws from a
    generator of its own, seeded by its name: a pipeline stage that has some of the layers gets the weights that they have in the
    whole model.
    """
    for name, module in model.named_modules():
        unit, _, inside = name.partition(".layers.")
        additions = 2 * len(model.get_submodule(f"{unit}.layers")) if inside.endswith(".out") else 1  # type: ignore[arg-type]
        if isinstance(module, nn.Linear | nn.Embedding):
            for part in parts(f"{name}.weight", module):
                matrix = part.name.removesuffix(".weight")
                generator = torch.Generator(module.weight.device).manual_seed(zlib.crc32(f"{seed}/{matrix}".encode()))
                nn.init.normal_(part.of(module.weight), std=_INIT_STD / math.sqrt(additions), generator=generator)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.reset_parameters()
