"""A step's timeline in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

There is one process per replica, one thread per stage and one slice per action. A slice is named like `F 12 (encoder)`, the
forward of microbatch 12; B is its backward, W the weight gradients that the backward put off. Actions that take no time are left
out, and `critical` says whether an action is on the step's critical path. Indices are those of the plan. A trace counts
microseconds: one unit of the cost table is a second.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from headrace.cli.planning.outcome import Outcome
from headrace.schedule import Kind

MAX_REPLICAS = 32  # in a trace: with eight stages and a hundred microbatches, some 50,000 slices, about as many as Perfetto bears
_US_PER_S = 1e6


def write_trace(out: Path, outcome: Outcome) -> Path:
    """Write the trace of a simulated step as a JSON file; return `out`.

    It has all replicas, or the slowest MAX_REPLICAS.
    """
    replicas = outcome.slowest(MAX_REPLICAS)
    events = [*_names(outcome, replicas), *_slices(outcome, replicas)]
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "strategy": outcome.plan.strategy,
            **({"chosen": outcome.plan.chosen} if outcome.plan.chosen else {}),
            "replicas": outcome.plan.topology.replicas,
            "iteration_s": outcome.predicted.iteration_s,
            "bubble": outcome.predicted.bubble,
        },
    }
    out.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
    return out


def _names(outcome: Outcome, replicas: list[int]) -> Iterator[dict[str, Any]]:
    for replica in replicas:
        yield _about(replica, 0, "process_name", name=f"replica {replica}")
        yield _about(replica, 0, "process_sort_index", sort_index=replica)
        for stage, name in enumerate(outcome.stage_names):
            yield _about(replica, stage, "thread_name", name=f"stage {stage} ({name})")
            yield _about(replica, stage, "thread_sort_index", sort_index=stage)


def _about(replica: int, stage: int, what: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": replica, "tid": stage, "args": args}


def _slices(outcome: Outcome, replicas: list[int]) -> Iterator[dict[str, Any]]:
    units, unit_of_stage = outcome.batch.units, outcome.unit_of_stage
    samples, deferred = outcome.num_samples(), outcome.num_samples(outcome.deferred())
    several_chunks = outcome.batch.execution.chunks > 1
    actions = outcome.timeline()
    drawn = np.isin(actions.replica, replicas) & (actions.end_s > actions.start_s)
    columns = (
        actions.replica, actions.stage, actions.microbatch, actions.kind, actions.chunk, actions.start_s, actions.end_s,
        actions.critical,
    )  # fmt: skip
    for replica, stage, microbatch, kind, chunk, start_s, end_s, critical in zip(
        *(column[drawn].tolist() for column in columns), strict=True
    ):
        unit = unit_of_stage[stage]
        what = Kind(kind)
        yield {
            "ph": "X",
            "name": f"{what.name[0]} {microbatch}{f'.{chunk}' if several_chunks else ''} ({units[unit]})",
            "cat": what.name.lower(),
            "pid": replica,
            "tid": stage,
            "ts": start_s * _US_PER_S,
            "dur": (end_s - start_s) * _US_PER_S,
            "args": {
                "unit": units[unit],
                "microbatch": microbatch,
                "chunk": chunk,
                "samples": int(samples[unit, replica, microbatch]),
                "deferred": int(deferred[unit, replica, microbatch]),
                "critical": bool(critical),
            },
        }
