"""The models of Cornstarch's evaluation (dissertation, tables 3.1 and 3.2), by counted operations.

A sample has 1,024 tokens of text, an image of 1280 x 720 and two minutes of audio; both encoders are merged into one unit, and
only projectors learn. Qwen2's vision tower has patches of 14 pixels, of which 4 become a token; Phi-4's audio encoder makes a
token of 8 frames of 10 ms. Widths of MLPs are not published: 4 widths for encoders, and about Llama 3's for the LLMs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from benchmarks.orchestrate.disttrain_models import counted_unit
from headrace.model_shape import TransformerShape
from headrace.plan import LLM
from headrace.reorder_service.planning.orchestration.cluster import CLUSTERS
from headrace.reorder_service.planning.orchestration.demand import Demand

GPUS, GLOBAL_BATCH, MICROBATCH, SLICES = 24, 48, 4, 4
IMAGE_POSITIONS, AUDIO_POSITIONS, TEXT = (1280 // 14) * (720 // 14), 120 * 100 // 8, 1024


def _encoder(layers: int, width: int) -> TransformerShape:
    return TransformerShape(layers=layers, width=width, heads=width // 64, kv_heads=width // 64, mlp=4 * width, gated=False)


def _llm(layers: int, width: int, mlp: int) -> TransformerShape:
    return TransformerShape(layers=layers, width=width, heads=width // 64, kv_heads=8, mlp=mlp, gated=True, vocab=128_256)


VISION: Mapping[str, TransformerShape] = {"S": _encoder(32, 1280), "M": _encoder(48, 2560), "L": _encoder(64, 3840)}
AUDIO: Mapping[str, TransformerShape] = {"S": _encoder(24, 1024), "M": _encoder(32, 3072), "L": _encoder(48, 5120)}
LLAMA: Mapping[str, TransformerShape] = {"S": _llm(16, 2048, 8192), "M": _llm(32, 4096, 14_336), "L": _llm(64, 5120, 25_600)}
PUBLISHED = {
    "SSS": 1.18, "MMS": 1.02, "LLS": 1.00, "SSM": 1.11, "MMM": 2.46, "LLM": 2.03, "SSL": 1.00, "MML": 1.30, "LLL": 1.72,
}  # fmt: skip
"""Table 3.2: step of stages levelled by forward times over that of frozen-aware ones, by sizes of vision, audio and LLM."""


def frozen_demand(sizes: str) -> Demand:
    """A model on 24 A40 with activation checkpointing: the LLM's backward runs forwards again, the encoders have none."""
    vision, audio, llm = tuple(sizes)
    cluster = CLUSTERS["a40"].of_gpus(GPUS)
    one = np.ones(1)
    tokens = IMAGE_POSITIONS // 4 + AUDIO_POSITIONS + TEXT
    parts = [
        counted_unit("encoder", VISION[vision], one * IMAGE_POSITIONS, IMAGE_POSITIONS, cluster, ("encoder",)),
        counted_unit("encoder", AUDIO[audio], one * AUDIO_POSITIONS, AUDIO_POSITIONS, cluster, ("encoder",)),
    ]
    encoder = replace(
        parts[0],
        layers=min(part.layers for part in parts),
        parameters=sum(part.parameters for part in parts),
        forward_s={tp: parts[0].forward_s[tp] + parts[1].forward_s[tp] for tp in parts[0].forward_s},
    )
    decoder = counted_unit(LLM, LLAMA[llm], one * tokens, tokens, cluster, (LLM,))
    return Demand(units=(encoder, decoder), cluster=cluster, global_batch=GLOBAL_BATCH)
