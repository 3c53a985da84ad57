"""What an LLM's step leaves idle on the GPUs of each of its stages: where an encoder may compute, and where it may communicate.

An encoder computes where the LLM does not. It communicates under kernels of the LLM that compute, never while the LLM's
tensor-parallel group communicates, because both would share the links; and in front of the stage's first action and behind its
last. Where the pipeline only waits, nothing of the LLM uses the links either, but the paper keeps encoders' communication out of
there too; `strict` does as it does.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.bubbles.llm_timeline import LlmTimeline

_TOUCH_S = 1e-12  # intervals that are no further apart are one


class Bubble(enum.IntEnum):
    """Where a kernel of an encoder lies."""

    START = 0
    """In front of the stage's first kernel: all-gather and warm-up; and before the step, if it starts before it."""
    PIPELINE = 1
    """Between two actions of the stage, whatever else it reaches into."""
    TENSOR = 2
    """While the LLM's tensor-parallel group communicates."""
    END = 3
    """Behind the stage's last kernel: cool-down and reduce-scatter; and behind the step."""
    UNDER_COMPUTE = 4
    """Beside a kernel of the LLM that computes: the place of communication."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IdleTime:
    """Intervals of time, in order and disjoint, one stage after another. The first of a stage has no start, the last no end."""

    begin_s: Floats
    """(I,)"""
    end_s: Floats
    """(I,)"""
    kind: Ints
    """(I,) as the value of a `Bubble`."""
    first: Ints
    """(S + 1,) where the intervals of a stage begin."""

    @property
    def num_stages(self) -> int:
        return self.first.size - 1

    def of_stage(self, stage: int) -> slice:
        """The places of a stage's intervals."""
        return slice(int(self.first[stage]), int(self.first[stage + 1]))


def compute_time(timeline: LlmTimeline) -> IdleTime:
    """Return where each stage's GPUs compute nothing: its bubbles."""
    parts = []
    for stage in range(timeline.num_stages):
        busy = _merged(_spans(timeline, stage, communicates=False))
        begin, end = np.append(-np.inf, busy[:, 1]), np.append(busy[:, 0], np.inf)
        parts.append((begin, end, _kinds(timeline, stage, begin, end)))
    return _joined(parts)


def communication_time(timeline: LlmTimeline, *, strict: bool = True) -> IdleTime:
    """Return where the GPUs of each stage may run an encoder's communication."""
    parts = []
    for stage in range(timeline.num_stages):
        first, last = float(timeline.first_s[stage]), float(timeline.last_s[stage])
        if strict:
            under = _merged(_spans(timeline, stage, communicates=False))
            spans = _merged(np.concatenate([[(-np.inf, first)], under, [(last, np.inf)]]))
        else:
            busy = _merged(_spans(timeline, stage, communicates=True))
            spans = np.stack([np.append(-np.inf, busy[:, 1]), np.append(busy[:, 0], np.inf)], axis=1)
        kind = np.full(len(spans), Bubble.UNDER_COMPUTE, np.int64)
        kind[0], kind[-1] = Bubble.START, Bubble.END
        parts.append((spans[:, 0], spans[:, 1], kind))
    return _joined(parts)


def idle_seconds(timeline: LlmTimeline) -> dict[Bubble, float]:
    """Return how long a GPU idles in each kind of bubble within the LLM's step, in the mean over the stages."""
    idle = compute_time(timeline)
    length = np.minimum(idle.end_s, timeline.end_s) - np.maximum(idle.begin_s, 0.0)
    sums = np.bincount(idle.kind, weights=length, minlength=len(Bubble)) / timeline.num_stages
    return {kind: float(sums[kind]) for kind in Bubble if kind != Bubble.UNDER_COMPUTE}


def _spans(timeline: LlmTimeline, stage: int, *, communicates: bool) -> Floats:
    """Return (n, 2) when the stage runs the LLM's kernels of one sort, in order."""
    spans = []
    for kind, kernels in enumerate(timeline.kernels):
        ends = np.cumsum(kernels.seconds)
        chosen = kernels.communicates == communicates
        starts = timeline.actions.start_s[stage, timeline.actions.kind[stage] == kind]
        of_kind = np.stack([(ends - kernels.seconds)[chosen], ends[chosen]], axis=1)
        spans.append((starts[:, None, None] + of_kind).reshape(-1, 2))
    together = np.concatenate(spans)
    ordered: Floats = together[np.argsort(together[:, 0], kind="stable")]
    return ordered


def _merged(spans: Floats) -> Floats:
    """Join (n, 2) intervals that touch."""
    if not len(spans):
        return spans
    opens = np.append(True, spans[1:, 0] > spans[:-1, 1] + _TOUCH_S)
    starts = np.flatnonzero(opens)
    merged: Floats = np.stack([spans[starts, 0], np.maximum.reduceat(spans[:, 1], starts)], axis=1)
    return merged


def _kinds(timeline: LlmTimeline, stage: int, begin: Floats, end: Floats) -> Ints:
    """Return (n,) of which kind the stage's bubbles are."""
    actions = timeline.actions
    gap_begin, gap_end = actions.end_s[stage, :-1], actions.start_s[stage, 1:]
    waits = gap_end > gap_begin + _TOUCH_S
    gap_begin, gap_end = gap_begin[waits], gap_end[waits]
    next_gap = np.searchsorted(gap_end, begin + _TOUCH_S)
    nearest = np.append(gap_begin, np.inf)[next_gap]
    kind = np.where(nearest < end - _TOUCH_S, Bubble.PIPELINE, Bubble.TENSOR)
    kind[0], kind[-1] = Bubble.START, Bubble.END
    return kind.astype(np.int64)


def _joined(parts: list[tuple[Floats, Floats, Ints]]) -> IdleTime:
    begin, end, kind = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return IdleTime(begin_s=begin, end_s=end, kind=kind, first=np.concatenate([[0], np.cumsum([len(part[0]) for part in parts])]))
