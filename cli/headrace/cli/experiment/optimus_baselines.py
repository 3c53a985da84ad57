"""Optimus' settings (tables 3, 5, 6, 7 and 11), and the steps of its baselines: Megatron-LM, and Megatron-LM balanced."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.cli.experiment.optimus_models import (
    GPT_175B,
    LLAMA_70B,
    MEMORY_BYTES,
    SEND_S,
    VIT_5B,
    VIT_11B,
    VIT_22B,
    Shape,
    encoder,
    llm,
    llm_layer,
)
from headrace.reorder_service.planning.bubbles.adjusted_warm_up import megatron_actions
from headrace.reorder_service.planning.bubbles.bubble_planner import BubblePlan, plan_bubbles
from headrace.reorder_service.planning.bubbles.layer_kernels import Passes
from headrace.reorder_service.planning.bubbles.llm_timeline import LlmPlan
from headrace.trainer.pipeline.layer_partition import partition

STAGES, CHUNKS, GPUS_PER_PIPELINE = 8, 12, 64
FITTED_EXCHANGE = 0.27
"""Share of table 1's data-parallel exchange with which coarse bubbles take as much of the encoder as table 7 says for 16
microbatches. There, 11 of 16, 24 and 32 microbatches are in them; with the whole exchange it would be nearly all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A column of tables 5 and 7: ViT-22B and GPT-175B, a batch of 1536 samples, 8 stages, 8 tensor-parallel ranks, 12 chunks."""

    replicas: int
    microbatches: int
    coarse: float
    fine: float
    runtime_s: float
    megatron_s: float
    balanced_s: float
    optimus_s: float


SETTINGS = (
    Published(
        replicas=24, microbatches=32, coarse=34.3, fine=57.5, runtime_s=322.2, megatron_s=10.65, balanced_s=10.43, optimus_s=9.80
    ),
    Published(
        replicas=32, microbatches=24, coarse=45.8, fine=69.3, runtime_s=89.6, megatron_s=8.26, balanced_s=8.06, optimus_s=7.29
    ),
    Published(
        replicas=48, microbatches=16, coarse=68.7, fine=85.0, runtime_s=15.1, megatron_s=5.91, balanced_s=5.87, optimus_s=4.87
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weak:
    """A model of tables 3 and 11, in microbatches of two samples."""

    encoder: Shape
    llm: Shape
    replicas: int
    stages: int
    balanced_chunks: int
    chunks: int
    """Of the LLM alone, whose layers they have to divide."""
    microbatches: int


WEAK: Mapping[str, Weak] = {
    "A": Weak(encoder=VIT_11B, llm=LLAMA_70B, replicas=2, stages=4, balanced_chunks=6, chunks=5, microbatches=8),
    "B": Weak(encoder=VIT_22B, llm=LLAMA_70B, replicas=4, stages=4, balanced_chunks=6, chunks=5, microbatches=8),
    "C": Weak(encoder=VIT_11B, llm=GPT_175B, replicas=4, stages=8, balanced_chunks=12, chunks=12, microbatches=16),
    "D": Weak(encoder=VIT_22B, llm=GPT_175B, replicas=8, stages=8, balanced_chunks=12, chunks=12, microbatches=16),
}
DUAL: Mapping[str, tuple[tuple[Shape, Shape], float]] = {
    "11B and 5B": ((VIT_11B, VIT_5B), 1.25),
    "22B and 5B": ((VIT_22B, VIT_5B), 1.26),
    "22B and 11B": ((VIT_22B, VIT_11B), 1.27),
}
"""Table 6 and figure 16: speed-up over Megatron-LM at best, with 512 GPUs and a batch of 256."""


def gpt(setting: Published, exchange: float) -> LlmPlan:
    """Return GPT-175B's plan in a column of table 5. exchange: share of table 1's exchange that nothing hides."""
    return llm(
        GPT_175B,
        replicas=setting.replicas,
        stages=STAGES,
        chunks=CHUNKS,
        microbatches=setting.microbatches,
        exchange=exchange,
    )


@functools.lru_cache(maxsize=8)
def planned(setting: Published, exchange: float) -> BubblePlan:
    """Plan ViT-22B's kernels into GPT-175B's bubbles; a setting is planned once."""
    return plan_bubbles(gpt(setting, exchange), [encoder(VIT_22B)], MEMORY_BYTES, send_s=SEND_S)


def megatron_s(plan: LlmPlan, shape: Shape, encoders: Sequence[Shape]) -> float:
    """Seconds of a step of 1F1B without chunks whose first stage has all encoders. The LLM's layers are cut so that stages are as
    even as they can be then, by operations: the paper says where encoders are, and not how many layers stand behind them."""
    of_encoders = [encoder(one).layer[8] for one in encoders for _ in range(one.layers)]
    operations = [sum(one.layers * one.layer_operations for one in encoders)] + [shape.layer_operations] * shape.layers
    bounds = partition(operations, plan.stages)
    llm_layers = [[llm_layer(shape)] * (high - low) for low, high in itertools.pairwise(bounds)]
    return _pipeline_s(plan, [[*of_encoders, *llm_layers[0][1:]], *llm_layers[1:]], 1)


def balanced_s(plan: LlmPlan, shape: Shape, encoder_shape: Shape, chunks: int) -> float:
    """Seconds of a step of interleaved 1F1B whose virtual stages, encoder and LLM in a row, are cut as evenly as can be, by
    operations (appendix B). Of equally good cuts it takes that with the least sum of squares; the paper does not say."""
    layers = [encoder(encoder_shape).layer[8]] * encoder_shape.layers + [llm_layer(shape)] * shape.layers
    operations = [encoder_shape.layer_operations] * encoder_shape.layers + [shape.layer_operations] * shape.layers
    bounds = partition(operations, plan.stages * chunks)
    return _pipeline_s(plan, [layers[low:high] for low, high in itertools.pairwise(bounds)], chunks)


def _pipeline_s(plan: LlmPlan, parts: Sequence[Sequence[Passes]], chunks: int) -> float:
    """Seconds of a step whose virtual stages have these layers, with the exchange in front of it and behind it."""
    seconds = np.array(
        [
            [sum(of_layer.forward.total_s for of_layer in part) for part in parts],
            [sum(of_layer.backward.total_s for of_layer in part) for part in parts],
        ]
    )
    by_stage = np.ascontiguousarray(seconds.reshape(2, chunks, plan.stages).transpose(0, 2, 1))
    return plan.all_gather_s + megatron_actions(by_stage, plan.microbatches).makespan_s + plan.reduce_scatter_s
