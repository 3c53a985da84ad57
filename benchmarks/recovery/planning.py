"""How long it takes to plan for the loss of nodes: before a job starts, and when a node is lost. One core."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.report import Row, Section, at_most
from benchmarks.timing import Timing, progress, time_calls
from headrace.reorder_service.recovery.instantiation import instantiate
from headrace.reorder_service.recovery.pipeline_templates import ModelProfile, plan_templates
from headrace.reorder_service.recovery.reconfiguration import Pipeline, reconfigure

NUM_LAYERS, NUM_NODES, NUM_GPUS = 96, 24, 8
TEMPLATES_GOAL_S = 1.0
OOBLECK = "Oobleck published 3,298 s for one template; its rewrite of 2026 needs under a second"  # dissertation, table 2.3
VISION_LAYERS = 24
LAYER_SECONDS = 0.02
LAYER_BYTES = 16 * 12 * 12_288**2  # of GPT-3 175B, with Adam
GPU_BYTES = 80 * 10**9
MAX_FAILURES = 2
GLOBAL_BATCH = 1_024


def sections(*, quick: bool) -> Iterator[Section]:
    """The templates of a job, and what is decided when nodes are lost or join."""
    budget_s = 0.5 if quick else 3.0
    profiles = {
        "llm of equal layers": _profile({"llm": NUM_LAYERS}),
        "vision and llm": _profile({"vision": VISION_LAYERS, "llm": NUM_LAYERS - VISION_LAYERS}),
        "llm, every layer of its own cost": _profile({"llm": NUM_LAYERS}, uneven=True),
    }
    yield Section(
        title=f"All templates: {NUM_LAYERS} layers, 1 to {NUM_NODES} nodes of {NUM_GPUS} GPUs; warm, one core. {OOBLECK}",
        rows=[_templates_row(name, profile, budget_s) for name, profile in profiles.items()],
    )
    yield _changes_section(budget_s)


def _profile(units: dict[str, int], *, uneven: bool = False, memory_bytes: int | None = None) -> ModelProfile:
    """Layers whose collectives on m GPUs take a fortieth of a GPU's time each; one of vision is a third of one of the llm."""
    gpus = np.arange(1, NUM_GPUS + 1)
    scale = np.ones(NUM_LAYERS)
    scale[: units.get("vision", 0)] = 1 / 3
    if uneven:
        scale *= np.random.default_rng(0).uniform(1.0, 1.5, NUM_LAYERS)
    layer_bytes = np.repeat((LAYER_BYTES * scale)[:, None], NUM_GPUS, axis=1)
    return ModelProfile(
        units=units,
        seconds=LAYER_SECONDS * scale[:, None] * (1 / gpus + (gpus - 1) / 40),
        gpu_bytes=(layer_bytes / gpus).astype(np.int64),
        memory_bytes=int(layer_bytes.sum()) if memory_bytes is None else memory_bytes,
    )


def _templates_row(name: str, profile: ModelProfile, budget_s: float) -> Row:
    progress(f"templates: {name}")
    timing = time_calls(lambda: plan_templates(profile, NUM_NODES, 0), budget_s=budget_s)
    return Row(name=name, value=timing.best_s, unit="s", goal=at_most(TEMPLATES_GOAL_S), detail=timing.detail)


def _changes_section(budget_s: float) -> Section:
    """A model that fills the memory of some nodes, so that pipelines borrow and merge."""
    progress("reconfiguration")
    units = {"vision": VISION_LAYERS, "llm": NUM_LAYERS - VISION_LAYERS}
    profile = _profile(units, memory_bytes=GPU_BYTES)
    templates = plan_templates(profile, NUM_NODES, MAX_FAILURES)
    smallest = templates.specification.smallest
    start = instantiate(templates, NUM_NODES, GLOBAL_BATCH, 1)
    names = iter(f"node{i}" for i in range(NUM_NODES))
    pipelines = [
        Pipeline(template=template, nodes=tuple(next(names) for _ in range(template.num_nodes))) for template in start.templates
    ]
    one, two = [pipelines[0].nodes[1]], [pipelines[0].nodes[1], pipelines[-1].nodes[0]]
    after = reconfigure(templates, pipelines, lost=two)
    changes = {
        "pipelines and microbatches of all nodes": lambda: instantiate(templates, NUM_NODES, GLOBAL_BATCH, 1),
        "one node lost": lambda: reconfigure(templates, pipelines, lost=one),
        "two nodes lost, of two pipelines": lambda: reconfigure(templates, pipelines, lost=two),
        "both of them back": lambda: reconfigure(templates, after.pipelines, joined=two),
    }
    title = (
        f"{NUM_NODES} nodes in {len(pipelines)} pipelines, each of {smallest} nodes or more; {MAX_FAILURES} may be lost at once; "
        f"{GLOBAL_BATCH:,} microbatches; warm, one core"
    )
    return Section(title=title, rows=[_ms_row(name, time_calls(call, budget_s=budget_s / 4)) for name, call in changes.items()])


def _ms_row(name: str, timing: Timing) -> Row:
    return Row(name=name, value=timing.best_s * 1e3, unit="ms", detail=timing.detail)
