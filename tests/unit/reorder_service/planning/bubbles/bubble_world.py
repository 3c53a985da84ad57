"""Small problems of encoders in an LLM's bubbles, and what every schedule of them has to keep."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from headrace.reorder_service.planning.bubbles.bubble_planner import make_problem
from headrace.reorder_service.planning.bubbles.encoder_plans import encoder_plans
from headrace.reorder_service.planning.bubbles.layer_kernels import Encoder, LayerKernels, Passes
from headrace.reorder_service.planning.bubbles.llm_timeline import LlmPlan, LlmTimeline, time_llm
from headrace.reorder_service.planning.bubbles.placed_encoders import COMMUNICATE, PlacedEncoders, Problem

Span = tuple[float, float]
NEAR = 1e-8
ROOMY = 1e15


def llm_plan(layer: Passes, **changes: float) -> LlmPlan:
    """Two stages, one chunk each of one layer, four microbatches, one GPU a stage, an exchange of 3 s in front and 5 behind."""
    values = {
        "replicas": 1,
        "stages": 2,
        "tensor": 1,
        "microbatches": 4,
        "layers": 2,
        "all_gather_s": 3.0,
        "reduce_scatter_s": 5.0,
        **changes,
    }
    return LlmPlan(layer=layer, **values)  # type: ignore[arg-type]


def passes(forward: Sequence[tuple[str, float]], backward: Sequence[tuple[str, float]]) -> Passes:
    return Passes(forward=LayerKernels.of(forward), backward=LayerKernels.of(backward))


LLM_LAYER = passes(
    [("compute", 1.0), ("communicate", 0.5), ("compute", 1.0), ("communicate", 0.5)],
    [("communicate", 0.5), ("compute", 2.0), ("communicate", 0.5), ("compute", 2.0)],
)
ENCODER_LAYER = passes(
    [("compute", 0.4), ("communicate", 0.2), ("compute", 0.5)], [("compute", 0.5), ("communicate", 0.2), ("compute", 0.5)]
)


def encoder(layers: int = 2, **changes: object) -> Encoder:
    """Layers with the same times on one and on two tensor-parallel ranks."""
    values = {"name": "vision", "layers": layers, "layer": {1: ENCODER_LAYER, 2: ENCODER_LAYER}, "weights": 10, **changes}
    return Encoder(**values)  # type: ignore[arg-type]


@st.composite
def kernels(draw: st.DrawFn, most: int, *, communicates: bool) -> LayerKernels:
    """From one kernel to `most`, in tenths of seconds so that lengths often are equal."""
    count = draw(st.integers(1, most))
    kinds = draw(st.lists(st.sampled_from(["compute", "communicate"]), min_size=count, max_size=count))
    tenths = draw(st.lists(st.integers(1, 12), min_size=count, max_size=count))
    return LayerKernels.of([(kind if communicates else "compute", t / 10) for kind, t in zip(kinds, tenths, strict=True)])


def drawn_kernels(rng: np.random.Generator, count: int) -> LayerKernels:
    """So many kernels of 0.1 to 1.2 s, two of five of which communicate; the first computes."""
    kinds = ["compute", *rng.choice(["communicate", "compute"], count - 1, p=[0.4, 0.6])]
    return LayerKernels.of([(str(kind), int(rng.integers(1, 13)) / 10) for kind in kinds])


@st.composite
def layers(draw: st.DrawFn, *, communicates: bool, most: int = 4) -> Passes:
    return Passes(forward=draw(kernels(most, communicates=communicates)), backward=draw(kernels(most, communicates=communicates)))


@st.composite
def problems(draw: st.DrawFn, *, equal: bool = False) -> Problem:
    """Every shape: one stage or several, one chunk or several, with and without tensor parallelism, several encoders, frozen or
    not, more pipelines than microbatches. equal: all microbatches have the same load."""
    stages, chunks, tensor = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3)), draw(st.sampled_from([1, 2]))
    count = draw(st.integers(1, 6))
    llm = llm_plan(
        draw(layers(communicates=tensor > 1)),
        stages=stages,
        chunks=chunks,
        tensor=tensor,
        layers=stages * chunks * draw(st.integers(1, 2)),
        microbatches=count,
        all_gather_s=draw(st.integers(0, 8)),
        reduce_scatter_s=draw(st.integers(0, 8)),
        hop_s=draw(st.sampled_from([0.0, 0.05])),
    )
    encoders = [
        encoder(
            draw(st.integers(stages, stages + 2)),
            name=f"encoder {number}",
            layer={1: draw(layers(communicates=False)), 2: draw(layers(communicates=True))},
            projector=draw(st.sampled_from([{}, {1: ENCODER_LAYER, 2: ENCODER_LAYER}])),
            frozen=draw(st.booleans()),
        )
        for number in range(draw(st.integers(1, 2)))
    ]
    plan = draw(st.sampled_from(encoder_plans(encoders, llm, ROOMY)))
    loads = [1.0] * count if equal else draw(st.lists(st.sampled_from([0.5, 1.0, 1.7]), min_size=count, max_size=count))
    return make_problem(
        llm,
        time_llm(llm),
        encoders,
        plan,
        send_s=draw(st.sampled_from([0.0, 0.07])),
        loads=np.array(loads),
        strict=draw(st.booleans()),
    )


def llm_spans(timeline: LlmTimeline, stage: int, *, communicates: bool) -> list[Span]:
    """When a stage of the LLM computes, or communicates: one span a kernel."""
    spans = []
    actions = timeline.actions
    for kind, at in zip(actions.kind[stage], actions.start_s[stage], strict=True):
        table = timeline.kernels[kind]
        for seconds, is_communication in zip(table.seconds, table.communicates, strict=True):
            if is_communication == communicates:
                spans.append((float(at), float(at + seconds)))
            at += seconds
    return spans


def apart(spans: list[Span]) -> bool:
    """No two overlap."""
    ordered = sorted(spans)
    return all(first[1] <= second[0] + NEAR for first, second in itertools.pairwise(ordered))


def covered(span: Span, by: list[Span]) -> bool:
    """Lies in what the others cover together."""
    at = span[0]
    for low, high in sorted(by):
        if low <= at + NEAR:
            at = max(at, high)
    return at >= span[1] - NEAR


def check(placed: PlacedEncoders, *, strict: bool | None = None) -> None:
    """What encoders do never overlaps with what shares its stream or links, and waits for all that it needs."""
    problem = placed.problem
    assert placed.partition.sum() == problem.llm.microbatches
    assert ((placed.pipeline_of >= 0) & (placed.pipeline_of < problem.plan.pipelines)).all()
    starts_of = {False: placed.forward_s, True: placed.backward_s}
    streams: dict[tuple[int, int, int], list[Span]] = {}
    spans_of: dict[bool, list[Span]] = {False: [], True: []}
    stages = problem.plan.stages
    for backward, table in zip((False, True), problem.tables(), strict=True):
        starts = starts_of[backward]
        assert np.isfinite(starts).all()
        for m, branch in itertools.product(range(problem.llm.microbatches), range(len(table.segments))):
            ready = problem.timeline.backward_ready_s[m] + problem.send_s if backward else -np.inf
            for segment in range(stages):
                stage = stages - 1 - segment if backward else segment
                for kernel in range(table.segments[branch, segment], table.segments[branch, segment + 1]):
                    start = float(starts[m, kernel])
                    end = start + float(table.seconds[kernel] * problem.loads[m])
                    assert start >= ready - NEAR
                    ready = end
                    lane = int(placed.pipeline_of[m]), stage, int(table.streams[kernel])
                    streams.setdefault(lane, []).append((start, end))
                    spans_of[backward].append((start, end))
                if segment < stages - 1:
                    ready += problem.send_s
            if not backward:
                assert ready <= problem.timeline.forward_due_s[m] - problem.send_s + NEAR
    for (pipeline, stage, stream), spans in streams.items():
        llm_stage = int(problem.plan.llm_stages(problem.llm)[pipeline, stage])
        shared = llm_spans(problem.timeline, llm_stage, communicates=stream == COMMUNICATE)
        assert apart(spans)
        for span in spans:
            assert all(span[1] <= low + NEAR or span[0] >= high - NEAR for low, high in shared)
            if strict and stream == COMMUNICATE:
                first, last = problem.timeline.first_s[llm_stage], problem.timeline.last_s[llm_stage]
                computes = llm_spans(problem.timeline, llm_stage, communicates=False)
                assert covered(span, [(-np.inf, first), *computes, (last, np.inf)])
    prefix = max([0.0, *(-low for low, _ in spans_of[False])])
    suffix = max([0.0, *(high - problem.timeline.end_s for _, high in spans_of[True])])
    assert placed.latency_s == problem.timeline.end_s + prefix + suffix
