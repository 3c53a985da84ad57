"""A mixture in the manner of OrchMLLM's (section 8): LLaVA-1.5's instructions, LibriSpeech and AIR-Bench, by lengths alone.

Drawn are sides of images, seconds of recordings and tokens of text, from what is publicly known of these data sets; the numbers
of their samples say how often each occurs. Work is counted operations: linear layers, and attention inside each image, recording
or sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headrace.model_shape import TransformerShape
from headrace.published_models import PUBLISHED_MODELS
from headrace.reorder_service.planning.batch import Floats

PATCH, POSITIONS_PER_S = 14, 50
"""Pixels of a patch's side, and positions of the audio encoder for a second of sound."""
_SHARES = np.array([625.0, 40.0, 281.0, 21.0])
"""Thousands of samples: LLaVA-1.5's with an image and its text alone, LibriSpeech, AIR-Bench."""
_IMAGE, _TEXT, _SPEECH, _SOUND = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model of table 1 in the evaluation's settings."""

    resolution: int
    """Longest side of an image."""
    vision_merge: int
    """Positions of the vision encoder that become one token."""
    audio_merge: int
    mini_batch: int
    """Samples of a rank with balancing, on 2,560 ranks (section 8.1)."""
    unbalanced: int
    """The same without."""
    micro_batch: int
    """Samples of a rank on 128 ranks (section 8.3)."""


SETTINGS: Mapping[str, Setting] = {
    "mllm-10b": Setting(resolution=448, vision_merge=1, audio_merge=2, mini_batch=80, unbalanced=65, micro_batch=75),
    "mllm-18b": Setting(resolution=672, vision_merge=4, audio_merge=2, mini_batch=60, unbalanced=40, micro_batch=50),
    "mllm-84b": Setting(resolution=896, vision_merge=4, audio_merge=4, mini_batch=30, unbalanced=15, micro_batch=25),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mixture:
    """n samples of the mixture, as one model sees them."""

    model: str
    vision: Floats
    """(n,) positions in the vision encoder; 0 without an image."""
    audio: Floats
    """(n,) positions in the audio encoder; 0 without a recording."""
    llm: Floats
    """(n,) tokens."""

    def work(self, unit: str, lengths: Floats | None = None) -> Floats:
        """Return the (n,) forward operations of a unit on its own lengths, or on others."""
        shape = PUBLISHED_MODELS[self.model].units[unit]
        return operations(shape, getattr(self, unit) if lengths is None else lengths, causal=unit == "llm")


def operations(shape: TransformerShape, lengths: Floats, *, causal: bool) -> Floats:
    """Return the operations of a stack's forward on sequences of these lengths, each of which attends to itself."""
    attention = (2.0 if causal else 4.0) * shape.width * lengths
    counted: Floats = lengths * (shape.layers * (2.0 * shape.layer_weights + attention) + 2.0 * shape.width * shape.vocab)
    return counted


def draw(model: str, count: int, seed: int) -> Mixture:
    """Draw so many samples for a model, in random order."""
    setting, rng = SETTINGS[model], np.random.default_rng(seed)
    kind = rng.choice(4, size=count, p=_SHARES / _SHARES.sum())
    side = np.minimum(rng.choice([400.0, 500.0, 640.0, 1024.0], size=count, p=[0.12, 0.23, 0.55, 0.10]), setting.resolution)
    patches = np.ceil(side / PATCH) * np.ceil(side * rng.uniform(0.6, 1.0, count) / PATCH)
    vision = np.where(kind == _IMAGE, patches, 0.0)
    seconds = np.where(kind == _SPEECH, rng.triangular(1.5, 15.5, 17.0, count), rng.uniform(2.0, 30.0, count))
    audio = np.where(kind >= _SPEECH, np.ceil(seconds * POSITIONS_PER_S), 0.0)
    text = np.select(
        [kind == _IMAGE, kind == _TEXT, kind == _SPEECH],
        [rng.lognormal(5.2, 0.8, count), rng.lognormal(6.8, 0.8, count), 3.5 * seconds],
        default=rng.lognormal(3.7, 0.5, count),
    )
    tokens = np.ceil(vision / setting.vision_merge) + np.ceil(audio / setting.audio_merge) + np.ceil(np.minimum(text, 4096.0))
    return Mixture(model=model, vision=vision, audio=audio, llm=tokens)
