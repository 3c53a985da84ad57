"""A timeline's rows: what stages and ranks are called, and an action as the page draws it. Pure."""

from __future__ import annotations

import math
from typing import Any

from headrace.reorder_service.jobs.planned_step import PlannedStep
from headrace.reorder_service.page.job_views import figure

MOST_ACTIONS = 6_000  # that are shown, of the slowest replicas or ranks: half a megabyte of JSON

Row = tuple[str, list[dict[str, Any]]]
"""Name and actions of a stage, or of a rank that has all units."""


def replica_name(step: PlannedStep, replica: int) -> str:
    """Return what the rows of a pipeline begin with; nothing where a planned step has only one."""
    assert step.plan is not None, "only planned steps are shown"
    if step.formation is not None:
        return f"pipeline {replica} "
    most = max(step.plan.topology.replicas, *map(len, step.plan.unit_replicas.values()), 0)
    return f"replica {replica} " if most > 1 else ""


def stage_name(unit: str, stage: int, num_stages: int) -> str:
    """Return what a row of a stage of a unit ends with."""
    return f"{unit} {stage}" if num_stages > 1 else unit


def rank_name(rank: int) -> str:
    """Return the name of the row of a rank that has all units."""
    return f"rank {rank}"


def action_of(kind: str, microbatch: int | None, unit: str, begin_s: float, end_s: float, chunk: int = 0) -> dict[str, Any]:
    """Return an action; its chunk is left out where it is the first, as of a stage that has only one, and so is a microbatch that
    it is not of."""
    assert math.isfinite(end_s - begin_s), "what is drawn begins and ends"
    of_microbatch = {} if microbatch is None else {"microbatch": microbatch}
    action = {"kind": kind, **of_microbatch, "unit": unit, "begin_s": figure(begin_s), "end_s": figure(end_s)}
    return action | ({"chunk": chunk} if chunk else {})
