"""What a sample costs, estimated from its probe: the floating-point work of a forward pass at a nominal device rate.

Only ratios between samples and between units matter to the planner, so the rate is a constant and nothing is measured. A
transformer layer on x positions takes a * x^2 + b * x operations: a from attention (scores and their product with the
values), b from the query, key, value and output projections and the MLP. Attention stays inside one image, one recording
or one sample, so the squares are of their lengths, one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.model_shape import ModelShape, TransformerShape
from headrace.plan import LLM
from headrace.sample import Probe
from headrace.spec import AudioSpec, ImageSpec
from reorder_service.planning.batch import Floats

ENCODER = "encoder"
DEVICE_FLOPS_PER_S = 1e14  # nominal: about what an accelerator of 2020-2022 reaches in bf16 training
_PER_MULTIPLY_ADD = 2
_AUDIO_STRIDE = 2  # of the convolution before the audio encoder's attention


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """Operations of one layer's forward on x positions: `quadratic` * x^2 + `linear` * x."""

    quadratic: float
    linear: float

    @classmethod
    def of(cls, shape: TransformerShape, *, causal: bool) -> LayerCost:
        """The layer of `shape`. A causal layer computes half of the attention matrix."""
        key_value_width = shape.width * shape.kv_heads // shape.heads
        projections = 2 * shape.width * shape.width + 2 * shape.width * key_value_width
        mlp = (3 if shape.gated else 2) * shape.width * shape.mlp
        attention = 2 * shape.width * (0.5 if causal else 1.0)
        return cls(quadratic=_PER_MULTIPLY_ADD * attention, linear=float(_PER_MULTIPLY_ADD * (projections + mlp)))


def sample_costs(
    probes: Sequence[Probe], shape: ModelShape, *, image: ImageSpec, audio: AudioSpec, vocab: int = 0
) -> dict[str, Floats]:
    """Estimated forward seconds of each of n samples in each whole unit: `encoder` (vision and audio) and `llm`, (n,) each.

    The projectors, which join neighbours as `image` and `audio` say, count as encoder. vocab: size of the vocabulary if
    the output layer is to be counted, on every token. A sample without images and recordings costs the encoder nothing.
    """
    patches = _Lengths.of([probe.image_patches for probe in probes])
    states = _Lengths.of([[-(-frames // _AUDIO_STRIDE) for frames in probe.mel_frames] for probe in probes])
    tokens = _Lengths.of([(probe.num_tokens,) for probe in probes])

    vision = _stack(shape.vision, patches, causal=False)
    vision += patches.sums * _projector(shape.vision.width, image.merge**2, shape.llm.width)
    sound = _stack(shape.audio, states, causal=False)
    sound += states.sums * _projector(shape.audio.width, max(1, audio.frames_per_token // _AUDIO_STRIDE), shape.llm.width)
    llm = _stack(shape.llm, tokens, causal=True)
    llm += tokens.sums * float(_PER_MULTIPLY_ADD * shape.llm.width * vocab)
    return {ENCODER: (vision + sound) / DEVICE_FLOPS_PER_S, LLM: llm / DEVICE_FLOPS_PER_S}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Lengths:
    """Per sample, over its images or recordings: (n,) sum of the lengths and (n,) sum of their squares."""

    sums: Floats
    squares: Floats

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> _Lengths:
        """Integers are added exactly before they become floats."""
        return cls(
            sums=np.array([sum(row) for row in rows], dtype=np.float64),
            squares=np.array([sum(x * x for x in row) for row in rows], dtype=np.float64),
        )


def _stack(shape: TransformerShape, lengths: _Lengths, *, causal: bool) -> Floats:
    layer = LayerCost.of(shape, causal=causal)
    return shape.layers * (layer.quadratic * lengths.squares + layer.linear * lengths.sums)


def _projector(width: int, group: int, llm_width: int) -> float:
    """Operations per position: `group` positions become one token through (group * width)^2 and group * width * llm_width."""
    return float(_PER_MULTIPLY_ADD * width * (group * width + llm_width))
