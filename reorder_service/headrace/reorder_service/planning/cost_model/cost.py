"""Estimates of a sample's cost from its probe: forward seconds, activations kept for the backward, bytes between stages.

Seconds come from measured coefficients, or else from the floating-point work at a nominal device rate: only ratios between
samples and between units matter to the planner. A transformer layer on x positions takes a * x^2 + b * x, where a comes from
attention (scores and their product with the values) and b from the query, key, value and output projections and the MLP.
Attention stays inside one image, one recording or one sample, so their lengths are squared one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.model_shape import ModelShape, TransformerShape, projector_weights
from headrace.plan import GENERATOR, LLM
from headrace.reorder_service.planning.batch import Floats
from headrace.reorder_service.planning.cost_model.coefficients import AUDIO, TARGETS, VISION, Coefficients, LayerCost, total
from headrace.reorder_service.planning.cost_model.kept_bytes import Keeping, kept_bytes

if TYPE_CHECKING:  # importing these takes a fifth of a second
    from headrace.sample import Probe
    from headrace.spec import AudioSpec, ImageSpec

ENCODER = "encoder"
DEVICE_FLOPS_PER_S = 1e14  # nominal: about what an accelerator of 2020-2022 reaches in bf16 training
_PER_MULTIPLY_ADD = 2
_BYTES = 2  # per number in bf16
_AUDIO_STRIDE = 2  # stride of the convolution before the audio encoder's attention

PARTS_OF = {ENCODER: (VISION, AUDIO), VISION: (VISION,), AUDIO: (AUDIO,), LLM: (LLM,), GENERATOR: (GENERATOR,)}
"""The parts of a model that a unit has, by name of the unit."""
_MEDIA = {VISION: "images", AUDIO: "recordings", GENERATOR: "images"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleCosts:
    """Estimated costs of n samples: for each quantity, one (n,) float64 column per unit."""

    seconds: dict[str, Floats]
    """Forward time of a sample in the whole unit."""
    memory_bytes: dict[str, Floats]
    """Activations of a sample that all layers of the unit keep from the forward to the backward."""
    transfer_bytes: dict[str, Floats]
    """Hidden states of a sample that one stage of the unit sends to the next."""

    def shared(self, unit: str, ranks: int) -> SampleCosts:
        """Return the costs of each of so many ranks that share every sample's sequence in a unit: equal parts of them."""
        seconds, memory, transfer = (
            {**columns, unit: columns[unit] / ranks} for columns in (self.seconds, self.memory_bytes, self.transfer_bytes)
        )
        return SampleCosts(seconds=seconds, memory_bytes=memory, transfer_bytes=transfer)


def sample_costs(
    probes: Sequence[Probe],
    shape: ModelShape,
    *,
    image: ImageSpec,
    audio: AudioSpec,
    vocab: int = 0,
    units: Sequence[str] = (ENCODER, LLM),
) -> dict[str, Floats]:
    """Estimate the (n,) forward seconds of the samples in each unit, at the nominal device rate (see `estimate`)."""
    return estimate(probes, shape, image=image, audio=audio, vocab=vocab, units=units).seconds


def estimate(
    probes: Sequence[Probe],
    shape: ModelShape,
    *,
    image: ImageSpec,
    audio: AudioSpec,
    vocab: int = 0,
    units: Sequence[str] = (ENCODER, LLM),
    measured: Coefficients | None = None,
    tp: Mapping[str, int] | None = None,
    checkpointing: Collection[str] = (),
    frozen: Collection[str] = (),
    bf16_residual: Collection[str] = (),
    backward_factors: Mapping[str, float] | None = None,
) -> SampleCosts:
    """Estimate seconds, kept activations and transfers of n samples in each of `units`.

    units: `vision`, `audio` and `llm`, or `encoder` for the first two together; and `generator`, if the shape has one. The
    projectors, which merge neighbouring positions as `image` and `audio` say, count as part of the encoders. vocab: size of the
    job's vocabulary, 0 for the published one; the head counts on the tokens that carry loss, unless neither is known. A sample
    without images and recordings costs the encoder nothing. measured: coefficients that replace the shape's operations (see
    `MeasuredCosts.coefficients`). tp: number of slices of each layer by unit, 1 where none is given; measured coefficients have
    their own. checkpointing: units that keep only each layer's input. frozen: units without gradients of weights, which keep
    less. bf16_residual: units with `fp32_residual_connection: false`. backward_factors: as from `headrace.backward_factors`; a
    unit with 0 keeps nothing.

    Raises ValueError for any other units, and if a sample has media for which there is no unit or no measurement.
    """
    _check(units, shape)
    stacks = shape.units
    if measured is None:
        slices = {part: number for unit, number in (tp or {}).items() for part in PARTS_OF[unit]}
        reruns = (backward_factors or {}).get(LLM, 0.0) if LLM in checkpointing else 0.0
        layers = nominal_coefficients(shape, image=image, audio=audio, vocab=vocab, tp=slices, reruns=reruns)
    else:
        layers = measured
    lengths = {
        VISION: _Lengths.of([probe.image_patches for probe in probes]),
        AUDIO: _Lengths.of([probe.mel_frames for probe in probes], stride=_AUDIO_STRIDE),
        LLM: _Lengths.of([(probe.num_tokens,) for probe in probes]),
    }
    if GENERATOR in units:
        lengths[GENERATOR] = _Lengths.of([probe.image_patches for probe in probes], stride=image.merge**2)
    _check_parts(units, layers, lengths, probes)
    seconds = {part: x.on(total(layers.get(part, ()))) for part, x in lengths.items()}
    if TARGETS in layers:
        seconds[LLM] = seconds[LLM] + _Lengths.of([(probe.num_targets,) for probe in probes]).on(total(layers[TARGETS]))
    transfer = {part: x.sums * float(_BYTES * stacks[part].width) for part, x in lengths.items()}
    memory: dict[str, Floats] = {}
    for unit in units:
        idle = backward_factors is not None and backward_factors.get(unit) == 0
        keeping = Keeping(
            checkpointing=unit in checkpointing,
            frozen=unit in frozen,
            fp32_residual=unit not in bf16_residual,
            tp=(tp or {}).get(unit, 1),
        )
        kept = {part: 0.0 if idle else kept_bytes(stacks[part], keeping) for part in PARTS_OF[unit]}
        memory[unit] = np.sum([lengths[part].sums * amount for part, amount in kept.items()], axis=0)
    return SampleCosts(seconds=_by_unit(units, seconds), memory_bytes=memory, transfer_bytes=_by_unit(units, transfer))


def nominal_coefficients(
    shape: ModelShape,
    *,
    image: ImageSpec,
    audio: AudioSpec,
    vocab: int = 0,
    tp: Mapping[str, int] | None = None,
    reruns: float = 0.0,
) -> Coefficients:
    """Return the layer costs of a model's published shape at the nominal device rate, as the trainers run them.

    Each encoder's layers are followed by its projector, and a generator's by the projector to it and one entry for the layers at
    both of its ends. The LLM's head is its TARGETS, if the vocabulary is known.

    vocab: size of the job's vocabulary, 0 for the published one. tp: number of slices of each layer, and of the vocabulary of the
    head, by part; the other entries are whole on every slice. reruns: the LLM's backward over its forward if its layers run their
    forward again. As the head does not, its costs are such that with this ratio they come to what it takes; 0 where nothing runs
    again.
    """

    def stack(part: str, *, causal: bool = False) -> tuple[LayerCost, ...]:
        slices = (tp or {}).get(part, 1)
        return tuple(layer.sliced(slices) for layer in layer_costs(shape.units[part], causal=causal))

    frames = max(1, audio.frames_per_token // _AUDIO_STRIDE)
    head = shape.llm.width * (vocab or shape.llm.vocab)
    layers = {
        VISION: (*stack(VISION), _dense(projector_weights(shape.vision.width, image.merge**2, shape.llm.width))),
        AUDIO: (*stack(AUDIO), _dense(projector_weights(shape.audio.width, frames, shape.llm.width))),
        LLM: stack(LLM, causal=True),
    }
    if head:
        on_slice = _dense(head).sliced((tp or {}).get(LLM, 1))
        layers[TARGETS] = (on_slice.scaled(reruns / (1.0 + reruns)) if reruns else on_slice,)
    if shape.generator is not None:
        width = shape.generator.width
        ends = width * (2 * 3 * (image.merge * image.patch) ** 2 + width)  # tokens in, tokens out, diffusion time
        projector = projector_weights(shape.llm.width, 1, width)
        layers[GENERATOR] = (*stack(GENERATOR), _dense(projector), _dense(ends))
    return layers


def layer_costs(shape: TransformerShape, *, causal: bool = False) -> tuple[LayerCost, ...]:
    """Return the costs of a transformer stack's layers at the nominal device rate.

    A causal layer computes half of the attention matrix. With window attention, a position attends to `window` others however
    long the segment is, so the cost is per position. That overestimates a segment that is shorter than a window.
    """
    attention = _PER_MULTIPLY_ADD * 2 * shape.width * (0.5 if causal else 1.0) / DEVICE_FLOPS_PER_S
    dense = _dense(shape.layer_weights)
    full = LayerCost(quadratic=attention, linear=dense.linear)
    windowed = LayerCost(linear=dense.linear + attention * shape.window)
    return tuple(windowed if (layer + 1) % shape.full_every else full for layer in range(shape.layers))


def _dense(weights: int) -> LayerCost:
    """Return the cost of matrix products with `weights` elements in all, each used once by every position."""
    return LayerCost(linear=_PER_MULTIPLY_ADD * weights / DEVICE_FLOPS_PER_S)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Lengths:
    """The lengths of the images or recordings of n samples: per sample, (n,) their sum and (n,) the sum of their squares."""

    sums: Floats
    squares: Floats

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], *, stride: int = 1) -> _Lengths:
        """Add up the lengths and their squares, a row of lengths per sample. Sums below 2^53 are exact.

        stride: how many inputs become one position; each length is divided by it and rounded up.
        """
        counts = np.fromiter(map(len, rows), np.int64, len(rows))
        flat = np.fromiter(itertools.chain.from_iterable(rows), np.float64, int(counts.sum()))
        flat = np.ceil(flat / stride)
        owner = np.repeat(np.arange(len(rows)), counts)

        def summed(values: Floats) -> Floats:
            return np.bincount(owner, weights=values, minlength=len(rows)).astype(np.float64, copy=False)

        return cls(sums=summed(flat), squares=summed(flat * flat))

    def on(self, cost: LayerCost) -> Floats:
        """Return the (n,) forward seconds of the samples in a layer of that cost."""
        return cost.quadratic * self.squares + cost.linear * self.sums + cost.constant * (self.sums > 0)


def _by_unit(units: Sequence[str], parts: Mapping[str, Floats]) -> dict[str, Floats]:
    return {unit: np.sum([parts[part] for part in PARTS_OF[unit]], axis=0) for unit in units}


def _check(units: Sequence[str], shape: ModelShape) -> None:
    known = [unit for unit in PARTS_OF if unit != GENERATOR or shape.generator is not None]
    unknown = [unit for unit in units if unit not in known]
    if unknown:
        raise ValueError(f"the model's shape gives no cost for unit {unknown[0]!r}, only for {', '.join(known)}")
    parts = [part for unit in units for part in PARTS_OF[unit]]
    if len(set(parts)) != len(parts) or LLM not in parts:
        raise ValueError(f"units must have {LLM!r}, each unit once, and {ENCODER!r} without its parts, got {list(units)}")


def _check_parts(units: Sequence[str], layers: Coefficients, lengths: Mapping[str, _Lengths], probes: Sequence[Probe]) -> None:
    taken = {part for unit in units for part in PARTS_OF[unit]}
    for part in lengths:
        rows = np.flatnonzero(lengths[part].sums)
        if rows.size and (part not in taken or part not in layers):
            lacking = f"no unit of {list(units)}" if part not in taken else "no measured coefficient"
            media = _MEDIA.get(part, "tokens")
            raise ValueError(f"row {rows[0]} ({probes[rows[0]].name}) has {media}, but {lacking} stands for them: add {part!r}")
