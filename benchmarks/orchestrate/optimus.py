"""Encoders in an LLM's bubbles beside what Optimus reports (Feng et al.: tables 3, 5, 6 and 7). Every step is SIMULATED."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.orchestrate.optimus_models import (
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
from benchmarks.report import Rival, Row, Section, at_least, at_most
from benchmarks.timing import progress
from headrace.reorder_service.planning.bubbles.adjusted_warm_up import megatron_actions
from headrace.reorder_service.planning.bubbles.bubble_planner import BubblePlan, plan_bubbles
from headrace.reorder_service.planning.bubbles.coarse_schedule import coarse
from headrace.reorder_service.planning.bubbles.layer_kernels import Passes
from headrace.reorder_service.planning.bubbles.llm_timeline import LlmPlan
from headrace.reorder_service.planning.bubbles.moved_schedule import moved
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


WEAK = {
    "A": Weak(encoder=VIT_11B, llm=LLAMA_70B, replicas=2, stages=4, balanced_chunks=6, chunks=5, microbatches=8),
    "B": Weak(encoder=VIT_22B, llm=LLAMA_70B, replicas=4, stages=4, balanced_chunks=6, chunks=5, microbatches=8),
    "C": Weak(encoder=VIT_11B, llm=GPT_175B, replicas=4, stages=8, balanced_chunks=12, chunks=12, microbatches=16),
    "D": Weak(encoder=VIT_22B, llm=GPT_175B, replicas=8, stages=8, balanced_chunks=12, chunks=12, microbatches=16),
}
DUAL = {
    "11B and 5B": ((VIT_11B, VIT_5B), 1.25),
    "22B and 5B": ((VIT_22B, VIT_5B), 1.26),
    "22B and 11B": ((VIT_22B, VIT_11B), 1.27),
}
"""Table 6 and figure 16: speed-up over Megatron-LM at best, with 512 GPUs and a batch of 256."""


def sections() -> Iterator[Section]:
    """Table 7 under two readings of its bubbles, then tables 5, 3 and 6."""
    plan_bubbles(_gpt(SETTINGS[-1], 1.0), [encoder(VIT_22B)], MEMORY_BYTES, send_s=SEND_S)  # compiles
    whole = {setting: _planned(setting, 1.0) for setting in SETTINGS}
    yield _table_7(whole, "data-parallel exchange of table 1 (0.167 and 0.458 s)", goals=False)
    fitted = {setting: _planned(setting, FITTED_EXCHANGE) for setting in SETTINGS}
    yield _table_7(fitted, f"{FITTED_EXCHANGE:.0%} of that exchange, which fits coarse bubbles at 16 microbatches", goals=True)
    yield Section(
        title="SIMULATED step of baselines over ours, ViT-22B and GPT-175B (Optimus, table 5): exchange of table 1",
        rows=[row for setting, (plan, _) in whole.items() for row in _table_5(setting, plan)],
    )
    yield Section(
        title="SIMULATED step of baselines over ours, weak scaling from 64 to 512 GPUs (Optimus, table 3, figure 15)",
        rows=[row for name, model in WEAK.items() for row in _table_3(name, model)],
    )
    yield Section(
        title="SIMULATED step of Megatron-LM over ours, two encoders and GPT-175B, 512 GPUs (Optimus, table 6, figure 16)",
        rows=[_table_6(name, shapes, at_best) for name, (shapes, at_best) in DUAL.items()],
    )


def _gpt(setting: Published, exchange: float) -> LlmPlan:
    return llm(
        GPT_175B,
        replicas=setting.replicas,
        stages=STAGES,
        chunks=CHUNKS,
        microbatches=setting.microbatches,
        exchange=exchange,
    )


def _planned(setting: Published, exchange: float) -> tuple[BubblePlan, float]:
    """Plan one setting; return the plan and the seconds of a core that took."""
    progress(f"optimus: {setting.microbatches} microbatches, {exchange:.0%} of the exchange")
    before = time.process_time()
    plan = plan_bubbles(_gpt(setting, exchange), [encoder(VIT_22B)], MEMORY_BYTES, send_s=SEND_S)
    return plan, time.process_time() - before


def _table_7(planned: dict[Published, tuple[BubblePlan, float]], bubbles: str, *, goals: bool) -> Section:
    """Shares of the encoder's compute in bubbles, and how long the planner takes. goals: whether shares have one."""
    rows = []
    for setting, (plan, seconds) in planned.items():
        name = f"{setting.microbatches} microbatches, {setting.replicas * GPUS_PER_PIPELINE} GPUs"
        first = plan.coarse.problem
        of_plans = [moved(one.problem, coarse(one.problem).partition) for one in plan.tried]
        theirs = min(of_plans, key=lambda one: one.latency_s)
        rows += [
            Row(
                name=f"{name}, coarse bubbles",
                value=100 * plan.coarse.efficiency,
                unit="%",
                rival=Rival(value=setting.coarse, source="Optimus, table 7"),
                detail=f"SIMULATED; encoder: {first.plan.stages} stages, tensor {first.plan.tensor}",
            ),
            Row(
                name=f"{name}, all bubbles",
                value=100 * plan.best.efficiency,
                unit="%",
                rival=Rival(value=setting.fine, source="Optimus, table 7"),
                goal=at_least(setting.fine) if goals else None,
                detail=f"SIMULATED; step {plan.best.latency_s:.3f} s, LLM alone {plan.llm_s:.3f} s, "
                f"by algorithm 2 {theirs.latency_s:.3f} s and {100 * theirs.efficiency:.1f} %",
            ),
            Row(
                name=f"{name}, planner",
                value=seconds,
                unit="s",
                rival=Rival(value=setting.runtime_s, source="Optimus, table 7"),
                goal=at_most(3.0),
                detail=f"time of one core; {len(plan.tried)} encoder plans",
            ),
        ]
    return Section(title=f"SIMULATED shares of the encoder's compute inside the LLM's step: {bubbles}", rows=rows)


def _table_5(setting: Published, plan: BubblePlan) -> Iterator[Row]:
    ours = plan.best.latency_s
    for name, baseline_s, published_s in (
        ("Megatron-LM balanced", _balanced_s(_gpt(setting, 1.0), GPT_175B, VIT_22B, CHUNKS), setting.balanced_s),
        ("Megatron-LM", _megatron_s(_gpt(setting, 1.0), GPT_175B, [VIT_22B]), setting.megatron_s),
    ):
        yield Row(
            name=f"{name}, {setting.microbatches} microbatches",
            value=baseline_s / ours,
            unit="x",
            rival=Rival(value=published_s / setting.optimus_s, source="Optimus, table 5"),
            detail=f"SIMULATED; {baseline_s:.2f} s and {ours:.2f} s, published {published_s} s and {setting.optimus_s} s",
        )


def _table_3(name: str, model: Weak) -> Iterator[Row]:
    progress(f"optimus: model {name}")
    plan = llm(model.llm, replicas=model.replicas, stages=model.stages, chunks=model.chunks, microbatches=model.microbatches)
    ours = plan_bubbles(plan, [encoder(model.encoder)], MEMORY_BYTES, send_s=SEND_S).best.latency_s
    for baseline, theirs, at_best in (
        ("Megatron-LM balanced", _balanced_s(plan, model.llm, model.encoder, model.balanced_chunks), 1.18),
        ("Megatron-LM", _megatron_s(plan, model.llm, [model.encoder]), 1.22),
    ):
        yield Row(
            name=f"model {name} ({model.encoder.name}, {model.llm.name}), {baseline}",
            value=theirs / ours,
            unit="x",
            rival=Rival(value=at_best, source="Optimus, at best"),
            detail=f"SIMULATED; {theirs:.2f} s and {ours:.2f} s",
        )


def _table_6(name: str, shapes: Sequence[Shape], at_best: float) -> Row:
    progress(f"optimus: encoders {name}")
    plan = llm(GPT_175B, replicas=8, stages=STAGES, chunks=CHUNKS, microbatches=16)
    ours = plan_bubbles(plan, [encoder(shape) for shape in shapes], MEMORY_BYTES, send_s=SEND_S).best.latency_s
    theirs = _megatron_s(plan, GPT_175B, shapes)
    return Row(
        name=f"encoders of {name}",
        value=theirs / ours,
        unit="x",
        rival=Rival(value=at_best, source="Optimus, at best"),
        detail=f"SIMULATED; {theirs:.2f} s and {ours:.2f} s",
    )


def _megatron_s(plan: LlmPlan, shape: Shape, encoders: Sequence[Shape]) -> float:
    """Seconds of a step of 1F1B without chunks whose first stage has all encoders. The LLM's layers are cut so that stages are as
    even as they can be then, by operations: the paper says where encoders are, and not how many layers stand behind them."""
    of_encoders = [encoder(one).layer[8] for one in encoders for _ in range(one.layers)]
    operations = [sum(one.layers * one.layer_operations for one in encoders)] + [shape.layer_operations] * shape.layers
    bounds = partition(operations, plan.stages)
    llm_layers = [[llm_layer(shape)] * (high - low) for low, high in itertools.pairwise(bounds)]
    return _pipeline_s(plan, [[*of_encoders, *llm_layers[0][1:]], *llm_layers[1:]], 1)


def _balanced_s(plan: LlmPlan, shape: Shape, encoder_shape: Shape, chunks: int) -> float:
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
