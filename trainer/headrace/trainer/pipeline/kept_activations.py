"""What a stage keeps of a row between its forward and its backward, measured on its own device with a few made-up samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.anyres import uncut_tokens
from headrace.plan import GENERATOR, LLM
from headrace.sample import LABEL_IGNORED, Probe
from headrace.spec import AudioSpec, ImageSpec
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.loading.device_copy import to_device
from headrace.trainer.loading.random_batch import random_batch
from headrace.trainer.pipeline.gradient_flow import GradientFlow, needs_output_gradient
from headrace.trainer.pipeline.live_bytes import LiveBytes
from headrace.trainer.pipeline.stage import ENCODERS, Stage
from headrace.trainer.pipeline.topology import ENCODER, PipelineTopology, Place

_TEXT, _SIDE, _FRAMES = 64, 8, 128
"""Tokens of text, image tokens along each side of the image where the job has no size of its own, and mel frames of the recording
of a made-up sample."""
_SAMPLES = 1, 3
"""Numbers of samples of which the difference counts: casts of weights and the like do not grow with the samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptActivations:
    """Bytes that a stage keeps of one row; logits apart, which do not grow with the rows beyond `loss.MAX_LOGITS`."""

    layers: tuple[float, ...]
    """Of each layer that keeps its activations."""
    inputs: tuple[float, ...]
    """Of each layer that runs again in the backward."""
    ends: float
    """Of all that is in front of the layers and behind them."""

    def of_row(self, checkpointed: Collection[int]) -> float:
        """Return the bytes of a row if these layers run again in the backward."""
        both = enumerate(zip(self.layers, self.inputs, strict=True))
        return max(0.0, self.ends + sum(again if index in checkpointed else kept for index, (kept, again) in both))

    @property
    def savings(self) -> Sequence[tuple[int, float]]:
        """Index of each layer that keeps less if it runs again, and how much less, the first of the largest in front."""
        found = [(index, kept - self.inputs[index]) for index, kept in enumerate(self.layers)]
        return sorted([one for one in found if one[1] > 0], key=lambda one: -one[1])


def measure_kept(
    stage: Stage,
    topology: PipelineTopology,
    place: Place,
    chunk: int,
    *,
    dtype: torch.dtype,
    image: ImageSpec,
    audio: AudioSpec,
    groups: Collection[dist.ProcessGroup] = (),
) -> KeptActivations:
    """Run a stage's forward on made-up samples, and return what it keeps; on all slices the same.

    chunk: number of the stage among those of its process. dtype: that of matrix products. groups: those of
    the stage's slices, all of which call this at the same time; the most that one of them keeps counts.
    """
    few, many = (_batch(count, stage, topology, image, audio) for count in _SAMPLES)
    rows = [stage.prepare(data).num_rows for data in (few, many)]
    position = chunk * topology.units[place.unit].pp + place.stage
    hidden_needs_gradient = GradientFlow.of(topology, place.unit).sends_gradient(position)
    sources = {LLM: [unit for unit in topology.units if unit in (ENCODER, *ENCODERS)], GENERATOR: [LLM]}.get(place.unit, [])
    arriving = {unit: needs_output_gradient(topology, unit) for unit in sources}
    checkpointed, found = stage.checkpointed, []
    for again in ((), range(len(stage.layers))):
        stage.checkpointed = again
        held = []
        for data in (few, few, many):  # the first time, tables that stay are made
            with torch.autocast(stage.device.type, dtype, enabled=dtype != torch.float32):
                held.append(_held(stage, data, dtype, hidden_needs_gradient, arriving))
        found.append([(more - less) / (rows[1] - rows[0]) for less, more in zip(*held[1:], strict=True)])
    stage.checkpointed = checkpointed
    most = torch.tensor(found, dtype=torch.float64, device=stage.device)
    for group in groups:
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    found = most.tolist()
    (*layers, ends), (*inputs, _) = found
    return KeptActivations(layers=tuple(layers), inputs=tuple(inputs), ends=ends)


def _batch(count: int, stage: Stage, topology: PipelineTopology, image: ImageSpec, audio: AudioSpec) -> PackedMicrobatch:
    """Return samples with text, and an image and a recording where a unit encodes them.

    One token of all carries loss: logits, which are counted by the rows of a step, do not differ with the number of samples.
    """
    placeholders = stage.model.image_token_id, stage.model.audio_token_id
    has_image, has_audio = ({encoder, ENCODER} & set(topology.units) for encoder in ENCODERS)
    side = image.side // (image.patch * image.merge) if image.fit in ("square", "tiles") else _SIDE
    patches = ((side * image.merge) ** 2,) if has_image and placeholders[0] >= 0 else ()
    frames = (min(_FRAMES, audio.most_frames),) if has_audio and placeholders[1] >= 0 else ()
    num_tokens = _TEXT + sum(uncut_tokens(count, image) for count in patches) + sum(map(audio.num_tokens, frames))
    probe = Probe(name="made up", num_tokens=num_tokens, num_targets=0, image_patches=patches, mel_frames=frames)
    data = random_batch([probe] * count, image=image, audio=audio, placeholders=placeholders)
    labels = torch.full_like(data.labels, LABEL_IGNORED)
    labels[0] = data.input_ids[0]
    return replace(data, labels=labels)


def _held(
    stage: Stage, data: PackedMicrobatch, dtype: torch.dtype, hidden_needs_gradient: bool, arriving: Mapping[str, bool]
) -> list[int]:
    """Return the bytes that each layer adds to what is held after the stage's forward, and then what all else adds."""
    inputs, marks = to_device(stage.prepare(data), stage.device), list[int]()
    hidden, arrived = None, dict[str, Tensor]()
    with ExitStack() as stack:
        meter = stack.enter_context(LiveBytes())
        if not stage.is_first:
            hidden = _random(stage.rows_between_stages(inputs.num_rows), stage.width, dtype, stage.device, hidden_needs_gradient)
        else:
            for unit, requires_grad in arriving.items():
                count = int(stage.input_token_counts(unit, data).sum())
                arrived[unit] = _random(count, stage.width, dtype, stage.device, requires_grad)
        for index, layer in enumerate(stage.layers):
            if index == 0:
                stack.callback(layer.register_forward_pre_hook(lambda *_: marks.append(meter.now)).remove)
            stack.callback(layer.register_forward_hook(lambda *_: marks.append(meter.now)).remove)
        with nullcontext() if stage.sharded is None else stage.sharded.passing(backward=False):
            output = stage(inputs, hidden, arrived)
        held = meter.now
        del output
    of_layers = [after - before for before, after in pairwise(marks)]
    return [*of_layers, held - sum(of_layers)]


def _random(rows: int, width: int, dtype: torch.dtype, device: torch.device, requires_grad: bool) -> Tensor:
    return torch.randn(rows, width, dtype=dtype, device=device).requires_grad_(requires_grad)
