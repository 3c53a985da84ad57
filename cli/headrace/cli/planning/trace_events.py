"""A step's timeline in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

There is one process per replica, one thread per stage and one slice per action. Where units share ranks, there is one thread per
rank, and a slice in each that takes the action. A slice is named like `F 12 (encoder)`, the forward of microbatch 12; B is its
backward, W the weight gradients that the backward put off, and `F 12.3` one of its chunks or pieces. Actions that take no time
are left out, and `critical` says whether an action is on the step's critical path. Indices are those of the plan. A trace counts
microseconds: one unit of the cost table is a second.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from headrace.cli.planning.outcome import Outcome
from headrace.cli.planning.tracks import Tracks
from headrace.reorder_service.planning.simulation.simulator import Timeline
from headrace.schedule import Kind

MAX_REPLICAS = 32  # in a trace: with eight stages and a hundred microbatches, some 50,000 slices, about as many as Perfetto bears
_US_PER_S = 1e6


def write_trace(out: Path, outcome: Outcome) -> Path:
    """Write the trace of a simulated step as a JSON file; return `out`.

    It has all replicas, or the slowest MAX_REPLICAS.
    """
    timeline = outcome.timeline()
    tracks = Tracks.of(outcome, timeline)
    replicas = tracks.slowest(timeline, MAX_REPLICAS)
    events = [*_names(outcome, tracks, replicas), *_slices(outcome, timeline, tracks, replicas)]
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "strategy": outcome.plan.strategy,
            **({"chosen": outcome.plan.chosen} if outcome.plan.chosen else {}),
            "replicas": outcome.plan.topology.replicas,
            **({"sharing": outcome.shared.sharing.order} if outcome.shared else {}),
            "iteration_s": outcome.predicted.iteration_s,
            "bubble": outcome.predicted.bubble,
        },
    }
    out.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
    return out


def _names(outcome: Outcome, tracks: Tracks, replicas: list[int]) -> Iterator[dict[str, Any]]:
    for replica in replicas:
        yield _about(replica, 0, "process_name", name=f"replica {replica}")
        yield _about(replica, 0, "process_sort_index", sort_index=replica)
        for thread, track in enumerate(np.flatnonzero(tracks.replica == replica).tolist()):
            name = tracks.names[track]
            yield _about(replica, thread, "thread_name", name=f"stage {thread} ({name})" if outcome.shared is None else name)
            yield _about(replica, thread, "thread_sort_index", sort_index=thread)


def _about(replica: int, thread: int, what: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": replica, "tid": thread, "args": args}


def _slices(outcome: Outcome, actions: Timeline, tracks: Tracks, replicas: list[int]) -> Iterator[dict[str, Any]]:
    units, unit_of_stage = outcome.batch.units, outcome.unit_of_stage
    samples, deferred = outcome.num_samples(), outcome.num_samples(outcome.deferred())
    in_parts = [outcome.batch.execution.chunks > 1 or units[unit] in outcome.cut_units for unit in unit_of_stage]
    thread_of = {track: place for r in replicas for place, track in enumerate(np.flatnonzero(tracks.replica == r).tolist())}
    for a, track in zip(
        *(column.tolist() for column in tracks.boxes(np.flatnonzero(actions.end_s > actions.start_s))), strict=True
    ):
        if track not in thread_of:
            continue
        stage, replica = int(actions.stage[a]), int(actions.replica[a])
        microbatch, chunk = int(actions.microbatch[a]), int(actions.chunk[a])
        unit, what = unit_of_stage[stage], Kind(actions.kind[a])
        yield {
            "ph": "X",
            "name": f"{what.name[0]} {microbatch}{f'.{chunk}' if in_parts[stage] else ''} ({units[unit]})",
            "cat": what.name.lower(),
            "pid": int(tracks.replica[track]),
            "tid": thread_of[track],
            "ts": float(actions.start_s[a]) * _US_PER_S,
            "dur": float(actions.end_s[a] - actions.start_s[a]) * _US_PER_S,
            "args": {
                "unit": units[unit],
                "replica": replica,
                "microbatch": microbatch,
                "chunk": chunk,
                "samples": int(samples[unit, replica, microbatch]),
                "deferred": int(deferred[unit, replica, microbatch]),
                "critical": bool(actions.critical[a]),
            },
        }
