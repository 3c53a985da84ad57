"""A schedule of encoders' kernels in an LLM's step, and what it is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.bubbles.encoder_plans import EncoderPlan
from headrace.reorder_service.planning.bubbles.idle_time import Bubble, IdleTime
from headrace.reorder_service.planning.bubbles.layer_kernels import Encoder
from headrace.reorder_service.planning.bubbles.llm_timeline import LlmPlan, LlmTimeline

COMPUTE, COMMUNICATE = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelTable:
    """The kernels of one microbatch in all encoders (branches), one way, in the order in which they run."""

    seconds: Floats
    """(k,)"""
    streams: Ints
    """(k,) COMPUTE or COMMUNICATE."""
    segments: Ints
    """(branches, stages + 1) where the kernels of a branch's stages begin; on the way back the last stage comes first."""
    stage_of: Ints
    """(stages,) encoder stage of each segment."""

    @classmethod
    def of(cls, encoders: Sequence[Encoder], plan: EncoderPlan, *, backward: bool) -> KernelTable:
        order = np.arange(plan.stages)[::-1].copy() if backward else np.arange(plan.stages)
        parts = [
            [encoder.stage_kernels(int(stage), plan.stages, plan.tensor, backward=backward) for stage in order]
            for encoder in encoders
        ]
        lengths = np.array([[part.seconds.size for part in of_branch] for of_branch in parts])
        ends = np.cumsum(lengths).reshape(lengths.shape)
        together = [part for of_branch in parts for part in of_branch]
        return cls(
            seconds=np.concatenate([part.seconds for part in together]),
            streams=np.concatenate([part.communicates for part in together]).astype(np.int64),
            segments=np.concatenate([ends[:, :1] - lengths[:, :1], ends], axis=1),
            stage_of=order,
        )

    @property
    def stages(self) -> Ints:
        """(k,) encoder stage of each kernel."""
        stages = np.empty(self.seconds.size, np.int64)
        for of_branch in self.segments:
            for segment, stage in enumerate(self.stage_of):
                stages[of_branch[segment] : of_branch[segment + 1]] = stage
        return stages


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """What is to be scheduled: the encoders' kernels of one step of one pipeline of the LLM, under one plan.

    Raises ValueError if there is not one load above 0 for each microbatch, or the time between stages is negative.
    """

    llm: LlmPlan
    timeline: LlmTimeline
    compute: IdleTime
    communication: IdleTime
    plan: EncoderPlan
    forward: KernelTable
    backward: KernelTable
    send_s: float
    """From one stage of an encoder to the next, and between its last stage and the LLM's first."""
    loads: Floats
    """(N,) how many times as long as in its profile an encoder's kernels take on each of the LLM's microbatches."""

    def __post_init__(self) -> None:
        if self.loads.shape != (self.llm.microbatches,) or not (np.isfinite(self.loads) & (self.loads > 0)).all():
            raise ValueError(f"each of the {self.llm.microbatches} microbatches needs a finite load above 0")
        if self.send_s < 0:
            raise ValueError(f"no transfer takes a negative time, got {self.send_s} s")

    @property
    def due_s(self) -> Floats:
        """(N,) when a microbatch's encoders are to be done."""
        return self.timeline.forward_due_s - self.send_s

    @property
    def ready_s(self) -> Floats:
        """(N,) when a microbatch's encoders may start their backward."""
        return self.timeline.backward_ready_s + self.send_s

    def under(self, encoders: Sequence[Encoder], plan: EncoderPlan) -> Problem:
        """Return the same problem under another plan."""
        forward, backward = (KernelTable.of(encoders, plan, backward=backward) for backward in (False, True))
        return replace(self, plan=plan, forward=forward, backward=backward)

    def tables(self) -> tuple[KernelTable, KernelTable]:
        """The kernels of a forward and of a backward."""
        return self.forward, self.backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A kernel on one GPU."""

    microbatch: int
    """Which of the LLM's microbatches."""
    backward: bool
    kernel: int
    """Which of the kernels of its table."""
    start_s: float
    """From the start of the LLM's step without encoders; negative in front of it."""
    end_s: float
    bubble: Bubble


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedEncoders:
    """When every kernel of the encoders runs."""

    problem: Problem
    pipeline_of: Ints
    """(N,) encoder pipeline of each of the LLM's microbatches, which thereby says in what order their activations go to it."""
    forward_s: Floats
    """(N, k) start of each kernel, in seconds from the start of the LLM's step without encoders."""
    backward_s: Floats
    """(N, k) likewise."""
    method: str
    """How it was found."""

    @property
    def partition(self) -> Ints:
        """(m,) number of microbatches of each encoder pipeline."""
        return np.bincount(self.pipeline_of, minlength=self.problem.plan.pipelines)

    @property
    def prefix_s(self) -> float:
        """What the LLM's step is put off by, so that encoders can begin before it."""
        return max(0.0, -float(self.forward_s.min(initial=0.0)))

    @property
    def suffix_s(self) -> float:
        """What the encoders still run when the LLM's step is over."""
        ends = self.backward_s + self.problem.loads[:, None] * self.problem.backward.seconds
        return max(0.0, float(ends.max(initial=0.0)) - self.problem.timeline.end_s)

    @property
    def latency_s(self) -> float:
        """Seconds of the step: the LLM's own, and what of the encoders is in front of it and behind it."""
        return self.prefix_s + self.problem.timeline.end_s + self.suffix_s

    @property
    def efficiency(self) -> float:
        """Share of the seconds in which encoders compute that lies inside the LLM's step; 1 if they have nothing to compute."""
        inside, total = 0.0, 0.0
        for starts, table in zip((self.forward_s, self.backward_s), self.problem.tables(), strict=True):
            computes = table.streams == COMPUTE
            begin = starts[:, computes]
            length = self.problem.loads[:, None] * table.seconds[computes]
            end = np.minimum(begin + length, self.problem.timeline.end_s)
            inside += float(np.maximum(end - np.maximum(begin, 0.0), 0.0).sum())
            total += float(length.sum())
        return inside / total if total > 0 else 1.0

    def most_held(self) -> float:
        """Return the most microbatches that a stage of an encoder pipeline holds at a time, from forward to backward."""
        most = 0
        stages = self.problem.forward.stages, self.problem.backward.stages
        for stage in range(self.problem.plan.stages):
            here, back = stages[0] == stage, stages[1] == stage
            if not back.any() or not here.any():
                continue
            taken = self.forward_s[:, here].min(axis=1)
            lengths = self.problem.loads[:, None] * self.problem.backward.seconds[back]
            freed = (self.backward_s[:, back] + lengths).max(axis=1)
            for pipeline in range(self.problem.plan.pipelines):
                of_pipeline = self.pipeline_of == pipeline
                if of_pipeline.any():
                    times = np.concatenate([freed[of_pipeline], taken[of_pipeline]])
                    change = np.repeat([-1, 1], of_pipeline.sum())
                    most = max(most, int(np.cumsum(change[np.argsort(times, kind="stable")]).max()))
        return float(most)

    def placements(self, gpu: int) -> list[Placement]:
        """Return what a GPU of the LLM's pipeline runs of the encoders, by start. gpu: as in `EncoderPlan.gpus`."""
        problem = self.problem
        ((pipeline, stage),) = np.argwhere((problem.plan.gpus(problem.llm) == gpu).any(axis=2)).tolist()
        llm_stage = int(problem.plan.llm_stages(problem.llm)[pipeline, stage])
        found = []
        for backward, table in enumerate(problem.tables()):
            starts = self.backward_s if backward else self.forward_s
            for kernel in np.flatnonzero(table.stages == stage).tolist():
                for microbatch in np.flatnonzero(self.pipeline_of == pipeline).tolist():
                    start = float(starts[microbatch, kernel])
                    end = start + float(table.seconds[kernel] * problem.loads[microbatch])
                    where = _bubble(problem, llm_stage, int(table.streams[kernel]), start, end)
                    found.append(
                        Placement(
                            microbatch=microbatch,
                            backward=bool(backward),
                            kernel=kernel,
                            start_s=start,
                            end_s=end,
                            bubble=where,
                        )
                    )
        return sorted(found, key=lambda placed: (placed.start_s, placed.microbatch, placed.kernel))


def _bubble(problem: Problem, llm_stage: int, stream: int, start: float, end: float) -> Bubble:
    """Return in which bubble of an LLM's stage a kernel lies."""
    if end <= problem.timeline.first_s[llm_stage] + 1e-9:
        return Bubble.START
    if start >= problem.timeline.last_s[llm_stage] - 1e-9:
        return Bubble.END
    if stream == COMMUNICATE:
        return Bubble.UNDER_COMPUTE
    here = problem.compute.of_stage(llm_stage)
    return Bubble(int(problem.compute.kind[here][np.searchsorted(problem.compute.begin_s[here], start + 1e-9) - 1]))
