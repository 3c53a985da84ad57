"""What pure functions of the product have returned, for runs that ask for the same again: all runs have the same data set.

A plan depends on nothing but the step's samples and the job's spec, and there are few jobs; so it is made once in a process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from typing import Any

from headrace.plan import StepPlan
from headrace.reorder_service.jobs.planned_step import PlannedStep
from headrace.spec import load_spec_json

MOST_PLANS = 4096  # of 20 KB each

_FIELDS = [field.name for field in fields(PlannedStep)]
_make_plan: Callable[..., StepPlan] = PlannedStep.make_plan
_known: dict[Any, tuple[StepPlan, dict[str, Any]]] = {}
"""Arguments -> the plan, and what else of the step was filled in."""

spec_of = lru_cache(64)(load_spec_json)


def make_plan(step: PlannedStep, spec: Any, topology: Any, formation: Any = None, **how: Any) -> StepPlan:
    """In place of PlannedStep.make_plan, of steps whose costs nobody corrects."""
    if step.correction.units or formation is not None:
        return _make_plan(step, spec, topology, formation, **how)
    samples = tuple((int(i), step.probes[int(i)]) for i in step.sample_ids)
    key = (step.index, samples, spec.to_json(), topology.model_dump_json(), *how.items())
    if key in _known:
        plan, filled = _known[key]
    else:
        before = {name: getattr(step, name) for name in _FIELDS}
        plan = _make_plan(step, spec, topology, **how)
        filled = {name: value for name in _FIELDS if (value := getattr(step, name)) is not before[name]}
        if len(_known) == MOST_PLANS:
            _known.clear()
        _known[key] = plan, filled
    for name, value in filled.items():
        setattr(step, name, value)
    return plan
