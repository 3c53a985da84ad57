"""Some consecutive layers of one unit of the model, as one process of a pipeline has them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headrace.plan import LLM
from trainer.collate import PackedMicrobatch, cumulative
from trainer.models.audio import encoder_frames
from trainer.models.loss import StepLoss, token_loss
from trainer.models.multimodal import MultimodalModel, fill, initialise
from trainer.pipeline.tensor import shard
from trainer.pipeline.topology import ENCODER, PipelineTopology, Place

TRUNKS = {"vision": "vision", "audio": "audio", LLM: "decoder"}
"""The module of the whole model that has a unit's layers."""
PROJECTORS = {"vision": "vision_projector", "audio": "audio_projector"}


class Stage(nn.Module, ABC):
    """Layers `first` to `last` of a unit; with the first one what comes before it, with the last one what comes behind.

    Its parameters have the names and, for a seed, the weights that they have in the whole model.
    """

    def __init__(self, model: MultimodalModel, unit: str, first: int, last: int, *, checkpointing: bool = False) -> None:
        """`model`: the whole one, of which only this stage's modules are kept; on the meta device it costs nothing."""
        super().__init__()
        trunk = model.get_submodule(TRUNKS[unit])
        layers = trunk.layers
        assert isinstance(layers, nn.ModuleList)
        self.unit = unit
        self.is_first, self.is_last = first == 0, last == len(layers)
        self.is_tied = unit == LLM and model.decoder.head is None
        """Whether embedding and head are one matrix, which the first and the last stage both have."""
        self.checkpointing = checkpointing
        self.width = int(trunk.width)  # type: ignore[arg-type]
        """Of hidden states between stages."""
        self.token_width = model.decoder.embed.embedding_dim
        """Of tokens between an encoder and the LLM."""
        self.model = model
        kept = {f"{TRUNKS[unit]}.layers.{index}" for index in range(first, last)}
        kept |= {f"{TRUNKS[unit]}.{name}" for name in self._ends()}
        if self.is_last and unit in PROJECTORS:
            kept.add(PROJECTORS[unit])
        _prune(model, kept)

    @abstractmethod
    def _ends(self) -> Sequence[str]:
        """The trunk's modules, besides layers, that this stage needs."""

    @abstractmethod
    def num_rows(self, data: PackedMicrobatch) -> int:
        """Of the hidden states of a portion. 0: the unit has nothing to do in it."""

    def tokens(self, _: PackedMicrobatch) -> Tensor:
        """(n,) tokens for the unit behind that the last stage makes of each sample, on the host."""
        raise AssertionError(f"nothing is behind {self.unit}")

    def tokens_of(self, unit: str, _: PackedMicrobatch) -> Tensor:
        """(n,) tokens of the unit in front that each sample takes, on the host."""
        raise AssertionError(f"{unit} is not in front of {self.unit}")

    @abstractmethod
    def _enter(self, data: PackedMicrobatch, arrived: Mapping[str, Tensor]) -> Tensor: ...

    @abstractmethod
    def _surroundings(self, data: PackedMicrobatch) -> tuple[Any, ...]: ...

    @abstractmethod
    def _leave(self, x: Tensor, data: PackedMicrobatch) -> Tensor | StepLoss: ...

    def forward(self, data: PackedMicrobatch, hidden: Tensor | None, arrived: Mapping[str, Tensor]) -> Tensor | StepLoss:
        """Hidden states for the next stage, on the last one tokens for the LLM, at the very end the loss.

        data: this unit's columns of a portion, on the device. hidden: (rows, width) from the stage before, None on the first one.
        arrived: on the LLM's first stage the tokens (t, width) of each encoder, in the order of the portion's samples.
        """
        x = self._enter(data, arrived) if hidden is None else hidden.float()
        surroundings = self._surroundings(data)
        for layer in self.layers:
            x = checkpoint(layer, x, *surroundings, use_reentrant=False) if self.checkpointing else layer(x, *surroundings)
        return self._leave(x, data) if self.is_last else x

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def layers(self) -> list[nn.Module]:
        trunk = self.model.get_submodule(TRUNKS[self.unit])
        return [layer for layer in trunk.layers if layer is not None]  # type: ignore[union-attr]

    def freeze(self, *, trunk: bool, projector: bool) -> None:
        """Have these parameters not learn."""
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not (projector if name.split(".")[0] in PROJECTORS.values() else trunk))


class EncoderStage(Stage):
    """Of an encoder, which ends in a projector."""

    @abstractmethod
    def tokens(self, data: PackedMicrobatch) -> Tensor:
        """(n,) tokens that the last stage makes of each sample, on the host."""


class VisionStage(EncoderStage):
    """Of the vision encoder and its projector; a row is a patch."""

    def _ends(self) -> Sequence[str]:
        return ["embed"] * self.is_first + ["norm"] * self.is_last

    def num_rows(self, data: PackedMicrobatch) -> int:
        return self.model.vision.num_rows(data.image_cu_seqlens)

    def _enter(self, data: PackedMicrobatch, _: Mapping[str, Tensor]) -> Tensor:
        return self.model.vision.enter(data.patches)

    def _surroundings(self, data: PackedMicrobatch) -> tuple[Any, ...]:
        return self.model.vision.surroundings(data.image_grids, data.image_cu_seqlens, self.device)

    def _leave(self, x: Tensor, data: PackedMicrobatch) -> Tensor:
        tokens: Tensor = self.model.vision_projector(self.model.vision.norm(x), data.image_cu_seqlens.diff())
        return tokens

    def tokens(self, data: PackedMicrobatch) -> Tensor:
        lengths = self.model.vision_projector.tokens(data.image_cu_seqlens.diff())
        return _sums(lengths, cumulative(data.images_per_sample))


class AudioStage(EncoderStage):
    """Of the audio encoder and its projector; a row is an encoder frame."""

    def _ends(self) -> Sequence[str]:
        return ["conv1", "conv2"] * self.is_first + ["norm"] * self.is_last

    def num_rows(self, data: PackedMicrobatch) -> int:
        return int(encoder_frames(data.mel_frames).sum())

    def _enter(self, data: PackedMicrobatch, _: Mapping[str, Tensor]) -> Tensor:
        return self.model.audio.enter(data.mel, data.mel_frames)

    def _surroundings(self, data: PackedMicrobatch) -> tuple[Any, ...]:
        return self.model.audio.surroundings(data.mel_frames, self.device)

    def _leave(self, x: Tensor, data: PackedMicrobatch) -> Tensor:
        tokens: Tensor = self.model.audio_projector(self.model.audio.norm(x), encoder_frames(data.mel_frames))
        return tokens

    def tokens(self, data: PackedMicrobatch) -> Tensor:
        lengths = self.model.audio_projector.tokens(encoder_frames(data.mel_frames))
        return _sums(lengths, cumulative(data.recordings_per_sample))


class JointEncoderStage(EncoderStage):
    """All encoders side by side, whole: the unit "encoder". A sample's tokens are those of its images, then of its recordings."""

    def __init__(self, model: MultimodalModel, unit: str, *_: int, checkpointing: bool = False) -> None:
        nn.Module.__init__(self)
        self.unit, self.model = unit, model
        self.is_first = self.is_last = True
        self.is_tied, self.checkpointing = False, checkpointing
        self.width = self.token_width = model.decoder.embed.embedding_dim
        _prune(model, {*PROJECTORS, *PROJECTORS.values()})

    def num_rows(self, data: PackedMicrobatch) -> int:
        return int(data.image_cu_seqlens[-1]) + int(data.mel_frames.sum())

    def _ends(self) -> Sequence[str]:
        return ()

    @property
    def layers(self) -> list[nn.Module]:
        return []

    def _surroundings(self, _: PackedMicrobatch) -> tuple[Any, ...]:
        return ()

    def _leave(self, x: Tensor, _: PackedMicrobatch) -> Tensor:
        return x

    def _enter(self, data: PackedMicrobatch, _: Mapping[str, Tensor]) -> Tensor:
        tokens = [self.model.image_tokens(data), self.model.audio_tokens(data)]
        sample = torch.cat([torch.repeat_interleave(torch.arange(len(counts)), counts) for counts in self._tokens(data)])
        order = sample.argsort(stable=True).to(self.device, non_blocking=True)
        return torch.cat([some for some in tokens if some is not None])[order]

    def tokens(self, data: PackedMicrobatch) -> Tensor:
        images, recordings = self._tokens(data)
        return images + recordings

    def _tokens(self, data: PackedMicrobatch) -> tuple[Tensor, Tensor]:
        """(n,) of each kind."""
        patches = self.model.vision_projector.tokens(data.image_cu_seqlens.diff())
        frames = self.model.audio_projector.tokens(encoder_frames(data.mel_frames))
        return (
            _sums(patches, cumulative(data.images_per_sample)),
            _sums(frames, cumulative(data.recordings_per_sample)),
        )


class LlmStage(Stage):
    """Of the decoder; a row is a token."""

    def _ends(self) -> Sequence[str]:
        if not self.is_last:
            return ["embed"] * self.is_first
        return ["norm", "embed"] if self.is_tied else ["norm", "head"] + ["embed"] * self.is_first

    def num_rows(self, data: PackedMicrobatch) -> int:
        return len(data.input_ids)

    def _enter(self, data: PackedMicrobatch, arrived: Mapping[str, Tensor]) -> Tensor:
        x: Tensor = self.model.decoder.embed(data.input_ids)
        if ENCODER in arrived:
            counts = torch.stack([self.tokens_of(unit, data) for unit in PROJECTORS], dim=1).flatten()
            kind = torch.repeat_interleave(torch.arange(len(PROJECTORS)).repeat(len(data.sample_ids)), counts).to(x.device)
            arrived = {unit: arrived[ENCODER][kind == number] for number, unit in enumerate(PROJECTORS)}
        for unit in PROJECTORS:
            x = fill(x, data.input_ids == self._placeholder(unit), arrived.get(unit), unit)
        return x

    def tokens_of(self, unit: str, data: PackedMicrobatch) -> Tensor:
        """(n,) tokens of an encoder that each sample takes, on the host."""
        if unit == ENCODER:
            return self.tokens_of("vision", data) + self.tokens_of("audio", data)
        return _sums((data.input_ids == self._placeholder(unit)).cpu(), data.cu_seqlens)

    def _placeholder(self, unit: str) -> int:
        return self.model.image_token_id if unit == "vision" else self.model.audio_token_id

    def _surroundings(self, data: PackedMicrobatch) -> tuple[Any, ...]:
        return self.model.decoder.surroundings(data.position_ids, data.cu_seqlens)

    def _leave(self, x: Tensor, data: PackedMicrobatch) -> StepLoss:
        decoder = self.model.decoder
        hidden = decoder.norm(x)
        return StepLoss(loss_sum=token_loss(hidden, data.labels, decoder.output_weight), num_targets=data.num_targets)


STAGES: dict[str, type[Stage]] = {ENCODER: JointEncoderStage, "vision": VisionStage, "audio": AudioStage, LLM: LlmStage}


def build_stages(
    make_model: Callable[[], MultimodalModel],
    topology: PipelineTopology,
    place: Place,
    bounds: Sequence[int],
    *,
    seed: int,
    device: torch.device,
    slices: dist.ProcessGroup | None,
    initialise: Callable[[MultimodalModel, int], None] = initialise,
) -> list[Stage]:
    """The stages of one process, chunk after chunk, with weights; what is frozen does not learn.

    make_model: the whole model on the meta device, anew for every stage, which takes it apart. bounds: of the unit's parts, as
    `trainer.pipeline.partition.bounds` has them. slices: the processes that share every layer, as
    `trainer.pipeline.groups.ProcessGroups` has them; None where tp is 1. initialise: gives what a stage has of the model its
    weights for the seed.
    """
    unit = topology.units[place.unit]
    stages = []
    for chunk in range(topology.chunks):
        first, last = bounds[chunk * unit.pp + place.stage :][:2]
        stage = STAGES[place.unit](make_model(), place.unit, first, last, checkpointing=unit.checkpointing)
        stage.to_empty(device=device)
        initialise(stage.model, seed)
        if slices is not None:
            shard(stage.layers, slices, device.type)
        stages.append(stage)
    if stages[0].is_first and stages[-1].is_last and stages[-1].is_tied:
        stages[-1].model.decoder.embed = stages[0].model.decoder.embed
    for stage in stages:
        stage.freeze(trunk=unit.frozen, projector=unit.frozen_projector)
    return stages


def _prune(module: nn.Module, kept: Collection[str], prefix: str = "") -> None:
    """Take out every module that is neither kept nor around one that is; indices of lists stay."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if path in kept:
            continue
        if any(other.startswith(f"{path}.") for other in kept):
            _prune(child, kept, f"{path}.")
        else:
            module.register_module(name, None)


def _sums(values: Tensor, cu_lengths: Tensor) -> Tensor:
    """(n,) sums of the values between offsets (n + 1,)."""
    upto = cumulative(values)
    return upto[cu_lengths[1:].long()] - upto[cu_lengths[:-1].long()]
