"""The stage class of each unit, and the construction of one process's stages with their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headrace.plan import GENERATOR, LLM
from headrace.schedule import GPIPE, ZERO_BUBBLE
from headrace.trainer.loading.collate import PackedMicrobatch, cumulative, sums
from headrace.trainer.models.attention import Segments
from headrace.trainer.models.audio_encoder import encoder_frames
from headrace.trainer.models.dropout import ResidualDropout
from headrace.trainer.models.generator import Flow, Generator, GeneratorLayout
from headrace.trainer.models.loss import StepLoss, Targets, token_loss
from headrace.trainer.models.multimodal import AudioInputs, ImageInputs, MultimodalModel, fill_placeholders, initialise
from headrace.trainer.models.projector import Groups
from headrace.trainer.pipeline.chunk import Inputs, Output
from headrace.trainer.pipeline.slice_collectives import gather_all
from headrace.trainer.pipeline.stage import ENCODERS, PROJECTORS, Stage, prune
from headrace.trainer.pipeline.tensor_parallel import Slices
from headrace.trainer.pipeline.topology import ENCODER, PipelineTopology, Place
from headrace.trainer.pipeline.vocabulary_parallel import VocabularySlice, cut_vocabulary, sliced_token_loss


class VisionStage(Stage):
    """A stage of the vision encoder, the last one with its projector; a row is a patch."""

    def _end_modules(self) -> Sequence[str]:
        return ["embed"] * self.is_first + ["norm"] * self.is_last

    def _num_rows(self, data: PackedMicrobatch) -> int:
        return self.model.vision.num_rows(data.image_cu_seqlens)

    def _entry_inputs(self, data: PackedMicrobatch) -> Tensor:
        return data.patches

    def _layer_inputs(self, data: PackedMicrobatch) -> Any:
        return self.model.vision.layout(data.image_grids, data.image_cu_seqlens)

    def _end_inputs(self, data: PackedMicrobatch) -> Any:
        return self.model.vision_projector.image_groups(data)

    def _embed_inputs(self, entry: Tensor, _: Mapping[str, Tensor]) -> Tensor:
        return self.model.vision.embed_inputs(entry)

    def _layer_args(self, layers: Any) -> tuple[Any, ...]:
        return self.model.vision.layer_args(layers)

    def _make_output(self, x: Tensor, end: Groups) -> Output:
        return Output(rows=self.model.vision_projector(self.model.vision.norm(x), end))

    def token_counts(self, data: PackedMicrobatch) -> Tensor:
        return self.model.vision_projector.image_token_counts(data)


class AudioStage(Stage):
    """A stage of the audio encoder, the last one with its projector; a row is an encoder frame."""

    def _end_modules(self) -> Sequence[str]:
        return ["conv1", "conv2"] * self.is_first + ["norm"] * self.is_last

    def _num_rows(self, data: PackedMicrobatch) -> int:
        return int(encoder_frames(data.mel_frames).sum())

    def _entry_inputs(self, data: PackedMicrobatch) -> tuple[Tensor, Any]:
        return data.mel, self.model.audio.convolutions(data.mel_frames)

    def _layer_inputs(self, data: PackedMicrobatch) -> Any:
        return self.model.audio.layout(data.mel_frames)

    def _end_inputs(self, data: PackedMicrobatch) -> Groups:
        return self.model.audio_projector.groups(encoder_frames(data.mel_frames))

    def _embed_inputs(self, entry: tuple[Tensor, Any], _: Mapping[str, Tensor]) -> Tensor:
        return self.model.audio.embed_inputs(*entry)

    def _layer_args(self, layers: Any) -> tuple[Any, ...]:
        return self.model.audio.layer_args(layers)

    def _make_output(self, x: Tensor, end: Groups) -> Output:
        return Output(rows=self.model.audio_projector(self.model.audio.norm(x), end))

    def token_counts(self, data: PackedMicrobatch) -> Tensor:
        lengths = self.model.audio_projector.token_counts(encoder_frames(data.mel_frames))
        return sums(lengths, cumulative(data.recordings_per_sample))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JointEncoderEntry:
    """What the joint encoders take of a portion."""

    images: ImageInputs | None
    recordings: AudioInputs | None
    order: Tensor
    """(t,) int64: the index, among all image tokens and then all audio tokens, of each token in the order of the samples."""


class JointEncoderStage(Stage):
    """The only stage of the unit "encoder": all encoders with their projectors, uncut and side by side.

    A sample's tokens are those of its images, then of its recordings.
    """

    def __init__(self, model: MultimodalModel, unit: str, *_: int, **__: bool) -> None:
        nn.Module.__init__(self)
        self.unit, self.model = unit, model
        self.is_first = self.is_last = True
        self.is_tied, self.checkpointed, self.fp32_residual, self.slices, self.sharded = False, (), True, None, None
        self.width = self.token_width = model.decoder.embed.embedding_dim
        prune(model, {*ENCODERS, *(PROJECTORS[encoder] for encoder in ENCODERS)})

    def _num_rows(self, data: PackedMicrobatch) -> int:
        return int(data.image_cu_seqlens[-1]) + int(data.mel_frames.sum())

    def _end_modules(self) -> Sequence[str]:
        return ()

    def _is_behind(self, _: str) -> bool:
        return False

    @property
    def layers(self) -> list[nn.Module]:
        return []

    def _entry_inputs(self, data: PackedMicrobatch) -> JointEncoderEntry:
        sample = torch.cat(
            [torch.repeat_interleave(torch.arange(len(counts)), counts) for counts in self._counts_by_encoder(data)]
        )
        order = sample.argsort(stable=True)
        return JointEncoderEntry(images=self.model.image_inputs(data), recordings=self.model.audio_inputs(data), order=order)

    def _layer_inputs(self, _: PackedMicrobatch) -> None:
        return None

    def _end_inputs(self, _: PackedMicrobatch) -> None:
        return None

    def _embed_inputs(self, entry: JointEncoderEntry, _: Mapping[str, Tensor]) -> Tensor:
        images = [] if entry.images is None else [self.model.image_tokens(entry.images)]
        recordings = [] if entry.recordings is None else [self.model.audio_tokens(entry.recordings)]
        return torch.cat(images + recordings)[entry.order]

    def _layer_args(self, _: None) -> tuple[Any, ...]:
        return ()

    def _make_output(self, x: Tensor, _: None) -> Output:
        return Output(rows=x)

    def token_counts(self, data: PackedMicrobatch) -> Tensor:
        images, recordings = self._counts_by_encoder(data)
        return images + recordings

    def _counts_by_encoder(self, data: PackedMicrobatch) -> tuple[Tensor, Tensor]:
        """Return the (n,) counts of image tokens and of audio tokens of each sample."""
        frames = self.model.audio_projector.token_counts(encoder_frames(data.mel_frames))
        return (
            self.model.vision_projector.image_token_counts(data),
            sums(frames, cumulative(data.recordings_per_sample)),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LlmEntry:
    """What the LLM's embedding takes of a portion."""

    input_ids: Tensor
    placeholders: Mapping[str, Tensor]
    """The rows (t,) int64 where tokens of each encoder belong."""
    of_encoders: Mapping[str, Tensor]
    """The rows (t,) int64 of each encoder's tokens among those of the unit "encoder", which has all encoders."""
    received: Mapping[str, Tensor] = field(default_factory=dict)
    """Where slices share sequences, by upstream unit: the rows (t,) int64 of this one's tokens among what all receive."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LlmEnd:
    """What the LLM's head, and the projector to a generator, take of a portion."""

    targets: Targets
    target_weight: float
    """Sum of their weights."""
    image_rows: Tensor
    """(t,) int64: the rows of image tokens."""


class LlmStage(Stage):
    """A stage of the LLM's decoder; a row is a token."""

    vocabulary: VocabularySlice | None = None
    """The part of the vocabulary that embedding and head have; None if they are whole."""
    gradients_with_loss: bool = True
    """Whether a whole head's gradients are computed with the loss: where a microbatch's backward is next."""
    compiles_loss: bool = False
    """Whether torch compiles what a whole head's loss does with logits."""
    context: dist.ProcessGroup | None = None
    """The context-parallel group, whose places share sequences; None: the stage has whole ones."""

    @property
    def holds_weight_gradient(self) -> bool:
        """Whether the gradient of the head's weight is held from a microbatch's loss until its backward."""
        return (
            self.is_last
            and self.gradients_with_loss
            and self.vocabulary is None
            and self.model.decoder.output_weight.requires_grad
        )

    def _end_modules(self) -> Sequence[str]:
        if not self.is_last:
            return ["embed"] * self.is_first
        return ["norm", "embed"] if self.is_tied else ["norm", "head"] + ["embed"] * self.is_first

    def _num_rows(self, data: PackedMicrobatch) -> int:
        return len(data.input_ids)

    def _entry_inputs(self, data: PackedMicrobatch) -> LlmEntry:
        counts = torch.stack([self.input_token_counts(unit, data) for unit in ENCODERS], dim=1).flatten()
        kind = torch.repeat_interleave(torch.arange(len(ENCODERS)).repeat(len(data.sample_ids)), counts)
        return LlmEntry(
            input_ids=data.input_ids,
            placeholders={unit: self.model.placeholders(unit, data.input_ids) for unit in ENCODERS},
            of_encoders={unit: (kind == number).nonzero().squeeze(1) for number, unit in enumerate(ENCODERS)},
        )

    def _layer_inputs(self, data: PackedMicrobatch) -> tuple[Tensor, Segments]:
        return self.model.decoder.positions(data), Segments.of(data.cu_seqlens)

    @property
    def dropout(self) -> ResidualDropout | None:
        """What drops values in the layers; None: nothing."""
        return self.model.decoder.dropout

    def _dropout_keys(self, data: PackedMicrobatch) -> Tensor | None:
        return self.model.decoder.dropout_keys(data)

    def _end_inputs(self, data: PackedMicrobatch) -> LlmEnd:
        targets = Targets.of(data.labels, data.target_weights)
        image_rows = self.model.placeholders("vision", data.input_ids)
        return LlmEnd(targets=targets, target_weight=data.target_weight, image_rows=image_rows)

    def _embed_inputs(self, entry: LlmEntry, arrived: Mapping[str, Tensor]) -> Tensor:
        x: Tensor = self.model.decoder.embed(entry.input_ids).float()
        if entry.received:
            assert self.context is not None, "somebody else receives the rest"
            arrived = {unit: gather_all(rows, self.context)[entry.received[unit]] for unit, rows in arrived.items()}
        if ENCODER in arrived:
            arrived = {unit: arrived[ENCODER][rows] for unit, rows in entry.of_encoders.items()}
        for unit, rows in entry.placeholders.items():
            x = fill_placeholders(x, rows, arrived.get(unit), unit)
        return x

    def input_token_counts(self, unit: str, data: PackedMicrobatch) -> Tensor:
        """Return the (n,) counts of tokens that each sample takes from an encoder unit, on the host."""
        if unit == ENCODER:
            return self.input_token_counts("vision", data) + self.input_token_counts("audio", data)
        token = self.model.image_token_id if unit == "vision" else self.model.audio_token_id
        return sums(data.input_ids == token, data.cu_seqlens)[data.sample_segments]

    def token_counts(self, data: PackedMicrobatch) -> Tensor:
        return self.input_token_counts("vision", data)

    def _layer_args(self, layers: tuple[Tensor, Segments]) -> tuple[Any, ...]:
        return self.model.decoder.layer_args(*layers)

    def _make_output(self, x: Tensor, end: LlmEnd) -> Output:
        decoder = self.model.decoder
        hidden = decoder.norm(x)
        targets, weight, cut = end.targets, decoder.output_weight, self.vocabulary
        if cut is None:
            loss_sum = token_loss(hidden, targets, weight, at_once=self.gradients_with_loss, compiled=self.compiles_loss)
        else:
            loss_sum = sliced_token_loss(hidden, targets, weight, cut)
        loss = StepLoss(loss_sum=loss_sum, target_weight=end.target_weight, is_shared=self.context is not None)
        has_behind = self.model.generator_projector is not None
        return Output(rows=self.model.conditions(hidden, end.image_rows) if has_behind else None, loss=loss)


class GeneratorStage(Stage):
    """A stage of the image generator; a row is a merged token of an image."""

    def _end_modules(self) -> Sequence[str]:
        return ["embed", "time"] * self.is_first + ["norm", "head"] * self.is_last

    @property
    def _generator(self) -> Generator:
        assert self.model.generator is not None, "the topology was checked"
        return self.model.generator

    def _num_rows(self, data: PackedMicrobatch) -> int:
        return self._generator.num_rows(data.image_cu_seqlens)

    def _entry_inputs(self, _: PackedMicrobatch) -> None:
        return None

    def _layer_inputs(self, data: PackedMicrobatch) -> tuple[Tensor, GeneratorLayout]:
        return data.patches, self._generator.layout(data)

    def _end_inputs(self, _: PackedMicrobatch) -> None:
        return None

    def input_token_counts(self, unit: str, data: PackedMicrobatch) -> Tensor:
        """Return the (n,) counts of tokens that each sample takes from the LLM, on the host."""
        assert unit == LLM, "nothing else is in front"
        return sums(self._generator.token_counts(data.image_cu_seqlens.diff()), cumulative(data.images_per_sample))

    def forward(self, inputs: Inputs, hidden: Tensor | None, arrived: Mapping[str, Tensor]) -> Output:
        """Run the stage, after drawing the noise once for the unit's entry and its loss (see `Stage.forward`)."""
        if self.is_first or self.is_last:
            self._flow: Flow = self._generator.flow(*inputs.layers)
        return super().forward(inputs, hidden, arrived)

    def _embed_inputs(self, _: None, arrived: Mapping[str, Tensor]) -> Tensor:
        return self._generator.embed_inputs(self._flow, arrived[LLM])

    def _layer_args(self, layers: tuple[Tensor, GeneratorLayout]) -> tuple[Any, ...]:
        return self._generator.layer_args(layers[1])

    def _make_output(self, x: Tensor, _: None) -> Output:
        return Output(loss=StepLoss(loss_sum=self._generator.loss(x, self._flow), target_weight=float(len(x))))


STAGES: dict[str, type[Stage]] = {
    ENCODER: JointEncoderStage,
    "vision": VisionStage,
    "audio": AudioStage,
    LLM: LlmStage,
    GENERATOR: GeneratorStage,
}


def build_stages(
    make_model: Callable[[], MultimodalModel],
    topology: PipelineTopology,
    place: Place,
    bounds: Sequence[int],
    *,
    seed: int,
    device: torch.device,
    slices: dist.ProcessGroup | None,
    context: dist.ProcessGroup | None = None,
    initialise: Callable[[MultimodalModel, int], None] = initialise,
    dtype: torch.dtype = torch.float32,
) -> list[Stage]:
    """Build the stages of one process, one per chunk in chunk order, with initial weights; frozen ones take no gradient.

    make_model: returns the whole model on the meta device, a new one for every stage, which takes it apart. bounds: layer bounds
    of the unit's parts, from `headrace.trainer.pipeline.layer_partition.bounds`. slices, context: the place's tensor-parallel and
    context-parallel groups (`process_groups.PlaceGroups`), None where it is alone in them. initialise: gives a stage's modules
    their weights for the seed. dtype: dtype of matrix products, in which frozen matrices are held.
    """
    unit = topology.units[place.unit]
    stages = []
    for chunk in range(topology.chunks_of(place.unit)):
        first, last = bounds[chunk * unit.pp + place.stage :][:2]
        stage = STAGES[place.unit](
            make_model(),
            place.unit,
            first,
            last,
            checkpointing=unit.checkpointing is True,
            fp32_residual=unit.fp32_residual_connection,
        )
        stage.to_empty(device=device)
        initialise(stage.model, seed)
        if slices is not None:
            stage.slices = Slices(slices, unit.tp_overlap)
            stage.slices.shard(stage.layers, is_first=stage.is_first, is_last=stage.is_last)
            if isinstance(stage, LlmStage):
                stage.vocabulary = cut_vocabulary(stage.model.decoder, slices)
        if isinstance(stage, LlmStage):
            stage.context = context
            stage.gradients_with_loss = topology.schedule != GPIPE and GENERATOR not in topology.units
            stage.compiles_loss = unit.compile
        stages.append(stage)
    if stages[0].is_first and stages[-1].is_last and stages[-1].is_tied:
        stages[-1].model.decoder.embed = stages[0].model.decoder.embed
    for stage in stages:
        stage.freeze(trunk=unit.frozen, projector=unit.frozen_projector, layers=unit.frozen_layers)
        stage.hold_frozen(dtype)
        if topology.schedule == ZERO_BUBBLE:
            stage.defer_weight_gradients()
        if unit.compile:
            stage.compile_layers()
    return stages
