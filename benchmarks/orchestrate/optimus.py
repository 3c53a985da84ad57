"""Encoders in an LLM's bubbles beside what Optimus reports (Feng et al.: tables 3, 5, 6 and 7). Every step is SIMULATED."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from benchmarks.report import Rival, Row, Section, at_least, at_most
from benchmarks.timing import progress
from headrace.cli.experiment.optimus_baselines import (
    CHUNKS,
    DUAL,
    FITTED_EXCHANGE,
    GPUS_PER_PIPELINE,
    SETTINGS,
    STAGES,
    WEAK,
    Published,
    Weak,
    balanced_s,
    gpt,
    megatron_s,
)
from headrace.cli.experiment.optimus_models import GPT_175B, MEMORY_BYTES, SEND_S, VIT_22B, Shape, encoder, llm
from headrace.reorder_service.planning.bubbles.bubble_planner import BubblePlan, plan_bubbles
from headrace.reorder_service.planning.bubbles.coarse_schedule import coarse
from headrace.reorder_service.planning.bubbles.moved_schedule import moved


def sections() -> Iterator[Section]:
    """Table 7 under two readings of its bubbles, then tables 5, 3 and 6."""
    plan_bubbles(gpt(SETTINGS[-1], 1.0), [encoder(VIT_22B)], MEMORY_BYTES, send_s=SEND_S)  # compiles
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


def _planned(setting: Published, exchange: float) -> tuple[BubblePlan, float]:
    """Plan one setting; return the plan and the seconds of a core that took."""
    progress(f"optimus: {setting.microbatches} microbatches, {exchange:.0%} of the exchange")
    before = time.process_time()
    plan = plan_bubbles(gpt(setting, exchange), [encoder(VIT_22B)], MEMORY_BYTES, send_s=SEND_S)
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
        ("Megatron-LM balanced", balanced_s(gpt(setting, 1.0), GPT_175B, VIT_22B, CHUNKS), setting.balanced_s),
        ("Megatron-LM", megatron_s(gpt(setting, 1.0), GPT_175B, [VIT_22B]), setting.megatron_s),
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
        ("Megatron-LM balanced", balanced_s(plan, model.llm, model.encoder, model.balanced_chunks), 1.18),
        ("Megatron-LM", megatron_s(plan, model.llm, [model.encoder]), 1.22),
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
    theirs = megatron_s(plan, GPT_175B, shapes)
    return Row(
        name=f"encoders of {name}",
        value=theirs / ours,
        unit="x",
        rival=Rival(value=at_best, source="Optimus, at best"),
        detail=f"SIMULATED; {theirs:.2f} s and {ours:.2f} s",
    )
