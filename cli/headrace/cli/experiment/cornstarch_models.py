"""The models of Cornstarch's evaluation (dissertation, tables 3.1 and 3.2), by counted operations.

A sample has 1,024 tokens of text, an image of 1280 x 720 and two minutes of audio; both encoders are merged into one unit, and
only projectors learn. Qwen2's vision tower has patches of 14 pixels, of which 4 become a token; Phi-4's audio encoder makes a
token of 8 frames of 10 ms.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headrace.cli.experiment.disttrain_models import counted_unit
from headrace.plan import LLM
from headrace.published_models import CORNSTARCH_AUDIO, CORNSTARCH_LLMS, CORNSTARCH_VISION
from headrace.reorder_service.planning.orchestration.cluster import CLUSTERS
from headrace.reorder_service.planning.orchestration.demand import Demand

GPUS, GLOBAL_BATCH, MICROBATCH, SLICES = 24, 48, 4, 4
IMAGE_POSITIONS, AUDIO_POSITIONS, TEXT = (1280 // 14) * (720 // 14), 120 * 100 // 8, 1024
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
        counted_unit("encoder", CORNSTARCH_VISION[vision], one * IMAGE_POSITIONS, IMAGE_POSITIONS, cluster, ("encoder",)),
        counted_unit("encoder", CORNSTARCH_AUDIO[audio], one * AUDIO_POSITIONS, AUDIO_POSITIONS, cluster, ("encoder",)),
    ]
    encoder = replace(
        parts[0],
        layers=min(part.layers for part in parts),
        parameters=sum(part.parameters for part in parts),
        forward_s={tp: parts[0].forward_s[tp] + parts[1].forward_s[tp] for tp in parts[0].forward_s},
    )
    decoder = counted_unit(LLM, CORNSTARCH_LLMS[llm], one * tokens, tokens, cluster, (LLM,))
    return Demand(units=(encoder, decoder), cluster=cluster, global_batch=GLOBAL_BATCH)
