"""The step of pipelines whose stages have parts of several units each, which `Work` does not know: for baselines.

A microbatch passes chunk 0 on all stages, then chunk 1, and so on, and back the other way; chunks differ in what they take.
Transfers take no time.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from headrace.jit import kernel
from headrace.plan import LLM
from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.schedule import Action, Kind, Schedule, build

_FORWARD, _BACKWARD = 0, 1
_NOT_YET = -1.0


def interleaved_actions(stages: int, microbatches: int, chunks: int) -> Ints:
    """Return (S, A, 3) kind, chunk and microbatch of the actions of interleaved 1F1B, or of 1F1B if there is one chunk."""
    return _interleaved(stages, microbatches, chunks)


def encoders_first_actions(stages: int, microbatches: int) -> Ints:
    """Return (S, A, 3) actions of DIP's order as Entrain describes it (dissertation, section 4.7.2 and figure 4.2c).

    Chunk 0 of each stage is of the encoders, chunk 1 of the LLM. A stage runs all encoder forwards, then the LLM in 1F1B, then
    all encoder backwards.
    """
    return _encoders_first(stages, microbatches)


@lru_cache(maxsize=64)
def _interleaved(stages: int, microbatches: int, chunks: int) -> Ints:
    return _table(build("interleaved", {LLM: stages}, range(microbatches), chunks=chunks))


@lru_cache(maxsize=64)
def _encoders_first(stages: int, microbatches: int) -> Ints:
    forwards, backwards = (
        tuple(Action(kind=kind, microbatch=m) for m in range(microbatches)) for kind in (Kind.FORWARD, Kind.BACKWARD)
    )
    llm = build("1f1b", {LLM: stages}, range(microbatches))
    behind = (tuple(Action(kind=a.kind, microbatch=a.microbatch, chunk=1) for a in actions) for actions in llm)
    return _table(tuple((*forwards, *of_llm, *backwards) for of_llm in behind))


def _table(schedule: Schedule) -> Ints:
    table = np.array([[(action.kind, action.chunk, action.microbatch) for action in actions] for actions in schedule], np.int64)
    table.flags.writeable = False
    return table


def chained_step_s(seconds: Floats, actions: Ints) -> float:
    """Return the seconds of a step of D replicas, which meet at its end.

    seconds: (2, D, K, S, V) of the forward and the backward of a microbatch in each chunk of each stage. actions: (S, 2 K V, 3).
    """
    return max(_makespan(np.ascontiguousarray(seconds[:, r]), actions.copy()) for r in range(seconds.shape[1]))


@kernel
def _makespan(seconds: Floats, actions: Ints) -> float:
    """Return when the last action of one replica ends. seconds: (2, K, S, V). Asserts that no action waits for ever."""
    _, microbatches, stages, chunks = seconds.shape
    ends = np.full((2, microbatches, stages, chunks), _NOT_YET)
    following, free = np.zeros(stages, np.int64), np.zeros(stages)
    left, before = actions.shape[0] * actions.shape[1], -1
    while left != before and left > 0:
        before = left
        for s in range(stages):
            while following[s] < actions.shape[1]:
                action = actions[s, following[s]]
                kind, c, m = action[0], action[1], action[2]
                if kind == _FORWARD and s > 0:
                    there = ends[_FORWARD, m, s - 1, c]
                elif kind == _FORWARD:
                    there = ends[_FORWARD, m, stages - 1, c - 1] if c > 0 else 0.0
                elif s < stages - 1:
                    there = ends[_BACKWARD, m, s + 1, c]
                elif c < chunks - 1:
                    there = ends[_BACKWARD, m, 0, c + 1]
                else:
                    there = ends[_FORWARD, m, s, c]
                if there == _NOT_YET:
                    break
                free[s] = max(free[s], there) + seconds[kind, m, s, c]
                ends[kind, m, s, c] = free[s]
                following[s] += 1
                left -= 1
    assert left == 0
    return float(free.max())
