"""Interleaved 1F1B with times of its own for every chunk, and with as short a warm-up as costs nothing (Optimus, figure 12).

Megatron-LM lets a stage with b stages behind it open with 2 b forwards more than the last stage. With b more the forwards of
later microbatches are due later, and often the step is not longer; how many are needed depends on the times of the chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.jit import kernel
from headrace.reorder_service.planning.batch import Floats, Ints

FORWARD, BACKWARD = 0, 1
_KIND, _CHUNK, _MICROBATCH = range(3)
_SLACK = 1e-9  # share by which sums in another order may differ


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimedActions:
    """When each stage of one pipeline runs each of its A actions, in order."""

    kind: Ints
    """(S, A) FORWARD or BACKWARD."""
    chunk: Ints
    """(S, A)."""
    microbatch: Ints
    """(S, A)."""
    start_s: Floats
    """(S, A) seconds from the start of the pipeline."""
    end_s: Floats
    """(S, A)."""

    @property
    def makespan_s(self) -> float:
        """Seconds until the last action ends."""
        return float(self.end_s.max(initial=0.0))


def megatron_actions(seconds: Floats, microbatches: int, hop_s: float = 0.0) -> TimedActions:
    """Time Megatron-LM's interleaved 1F1B, or 1F1B if there is one chunk.

    seconds: (2, S, V) of a forward and a backward of each stage's chunk. hop_s: from one stage's chunk to the next. The number of
    microbatches need not be a multiple of the stages: the last group is then larger.
    """
    stages, chunks = seconds.shape[1:]
    per_stage = 2 if chunks > 1 else 1
    return _timed(seconds, microbatches, hop_s, per_stage * np.arange(stages - 1, -1, -1))


def adjusted_actions(seconds: Floats, microbatches: int, hop_s: float = 0.0) -> TimedActions:
    """Time the schedule with the fewest warm-up forwards that is not longer than Megatron-LM's. Arguments as there.

    From the first stage on, a stage gives up warm-up forwards for as long as the step gets no longer; at first all of them do
    together. Then what the first stage runs of its first chunk is put off until something would have to wait for it.
    """
    stages, chunks = seconds.shape[1:]
    best = megatron_actions(seconds, microbatches, hop_s)
    if chunks > 1:
        limit = best.makespan_s * (1 + _SLACK)
        behind = np.arange(stages - 1, -1, -1)
        extra = 2 * behind
        for step in range(stages):
            tried = behind + -(-behind * step // (stages - 1)) if stages > 1 else behind
            timed = _timed(seconds, microbatches, hop_s, tried)
            if timed.makespan_s <= limit:
                best, extra = timed, tried
                break
        for stage in range(stages - 1):
            while extra[stage] > extra[stage + 1] + 1:  # with fewer, stages would wait for each other
                tried = extra - (np.arange(stages) == stage)
                timed = _timed(seconds, microbatches, hop_s, tried)
                if timed.makespan_s > limit:
                    break
                best, extra = timed, tried
    return _put_off(best, hop_s)


def _timed(seconds: Floats, microbatches: int, hop_s: float, extra: Ints) -> TimedActions:
    """Time the schedule whose stages open with so many forwards more than the last stage, which has as few as it can."""
    stages, chunks = seconds.shape[1:]
    turns = _turns(microbatches, chunks, stages)
    least = (chunks - 1) * (min(microbatches, stages) + (microbatches % stages if microbatches > stages else 0))
    total = microbatches * chunks
    actions = np.empty((stages, 2 * total, 3), np.int64)
    for stage in range(stages):
        ahead = min(total, least + int(extra[stage]))
        steady = np.empty((2 * (total - ahead), 3), np.int64)
        steady[0::2], steady[1::2] = turns[FORWARD, ahead:], turns[BACKWARD, : total - ahead]
        actions[stage] = np.concatenate([turns[FORWARD, :ahead], steady, turns[BACKWARD, total - ahead :]])
    starts, ends, done = _run(actions, np.ascontiguousarray(seconds), hop_s, microbatches)
    assert done == starts.size, "a warm-up that is long enough never waits for itself"
    return TimedActions(
        kind=actions[..., _KIND],
        chunk=actions[..., _CHUNK],
        microbatch=actions[..., _MICROBATCH],
        start_s=starts,
        end_s=ends,
    )


def _turns(microbatches: int, chunks: int, stages: int) -> Ints:
    """Return (2, microbatches * chunks, 3) the forwards and the backwards of a stage in order: group after group of as many
    microbatches as there are stages, and in a group chunk after chunk."""
    forward, backward = [], []
    groups = max(1, microbatches // stages)
    for group in range(groups):
        members = range(group * stages, (group + 1) * stages if group + 1 < groups else microbatches)
        for chunk in range(chunks):
            forward += [(FORWARD, chunk, m) for m in members]
            backward += [(BACKWARD, chunks - 1 - chunk, m) for m in members]
    return np.array([forward, backward], np.int64)


@kernel
def _run(actions: Ints, seconds: Floats, hop_s: float, microbatches: int) -> tuple[Floats, Floats, int]:
    """Run every action as early as its stage and its input allow: (S, A) starts, ends, and how many could run."""
    stages, count = actions.shape[:2]
    chunks = seconds.shape[2]
    starts, ends = np.zeros((stages, count)), np.zeros((stages, count))
    over = np.full((2, stages, chunks, microbatches), -1.0)
    place = np.zeros(stages, np.int64)
    done, before = 0, -1
    while done > before:
        before = done
        for s in range(stages):
            while place[s] < count:
                at = place[s]
                kind, chunk, m = actions[s, at, 0], actions[s, at, 1], actions[s, at, 2]
                source, of_chunk = (s - 1, chunk) if kind == 0 else (s + 1, chunk)
                if source < 0:
                    source, of_chunk = stages - 1, chunk - 1
                elif source == stages:
                    source, of_chunk = 0, chunk + 1
                ready = ends[s, at - 1] if at > 0 else 0.0
                needed = 0.0
                if 0 <= of_chunk < chunks:
                    needed = over[kind, source, of_chunk, m]
                    if needed >= 0.0 and source != s:
                        needed += hop_s
                elif kind == 1:
                    needed = over[0, s, chunk, m]
                if needed < 0.0:
                    break
                starts[s, at] = max(ready, needed)
                ends[s, at] = starts[s, at] + seconds[kind, s, chunk]
                over[kind, s, chunk, m] = ends[s, at]
                place[s] += 1
                done += 1
    return starts, ends, done


def _put_off(timed: TimedActions, hop_s: float) -> TimedActions:
    """Start the first stage's forwards of its first chunk as late as neither it nor the stage behind it would notice."""
    stages, count = timed.kind.shape
    start_s, end_s = timed.start_s.copy(), timed.end_s.copy()
    needed = _needed_at(timed, 1 if stages > 1 else 0, 0 if stages > 1 else 1) - (hop_s if stages > 1 else 0.0)
    for at in range(count - 1, -1, -1):
        if timed.kind[0, at] == FORWARD and timed.chunk[0, at] == 0:
            after = start_s[0, at + 1] if at + 1 < count else np.inf
            late = min(after, float(needed[timed.microbatch[0, at]]))
            delay = late - end_s[0, at]
            if 0 < delay < np.inf:
                start_s[0, at] += delay
                end_s[0, at] += delay
    return TimedActions(kind=timed.kind, chunk=timed.chunk, microbatch=timed.microbatch, start_s=start_s, end_s=end_s)


def _needed_at(timed: TimedActions, stage: int, chunk: int) -> Floats:
    """Return (N,) when a stage starts a chunk's forward of each microbatch; where there is no such chunk, its first backward."""
    has = bool((timed.chunk[stage] == chunk).any())
    kind = FORWARD if has else BACKWARD
    places = (timed.kind[stage] == kind) & (timed.chunk[stage] == (chunk if has else 0))
    needed = np.empty(int(timed.microbatch.max()) + 1)
    needed[timed.microbatch[stage, places]] = timed.start_s[stage, places]
    return needed
