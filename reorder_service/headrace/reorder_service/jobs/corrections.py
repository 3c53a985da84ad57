"""The corrections of a job's costs: fitted to what its latest steps took, and recorded before anything is planned with them.

All steps of a period are planned with one correction, which is in the store since the first of them was planned. So whoever plans
a step again, after a restart or when the job goes back, finds the same correction and makes the same plan.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import statistics
from collections.abc import Sequence
from dataclasses import replace

from headrace.observability.logs import pairs
from headrace.reorder_service.jobs.job_execution import execution_of
from headrace.reorder_service.jobs.measurements import observation, unexplained_s
from headrace.reorder_service.jobs.planned_step import PlannedStep
from headrace.reorder_service.planning.cost_model.correction import UNCORRECTED, Correction, fit
from headrace.reorder_service.store.state import StateStore
from headrace.spec import JobSpec

log = logging.getLogger(__name__)

PERIOD_STEPS = 4
SIMULATED_STEPS = 8  # latest ones by which a forecast is made to fit what steps take in the median
LEAST_STEPS = 3  # measured steps that a fit needs: the first one of a trainer is slower than all others


class Corrections:
    """The corrections of one job, by the step from which they hold."""

    def __init__(self, job: str, store: StateStore) -> None:
        self._job = job
        self._store = store
        self._known: tuple[int, str, Correction] | None = None  # the latest one asked for: its first step, its trainers
        self._deciding = asyncio.Lock()

    async def of_step(self, index: int, committed: Sequence[PlannedStep], spec: JobSpec, generation: int) -> Correction:
        """Return the correction with which step `index` is planned: the recorded one, or a new one, which is then recorded.

        What is recorded counts for trainers that run the same execution. `committed`: the latest committed steps, to which a new
        one is fitted. `spec`: as the job is planned now. `generation`: of committed steps that count.
        """
        if not spec.execution.correct_costs:
            return UNCORRECTED
        recorded = await self._recorded(index - index % PERIOD_STEPS, committed, spec, generation)
        return replace(recorded, units={unit: lines for unit, lines in recorded.units.items() if unit in spec.topology.stages})

    async def _recorded(self, first: int, committed: Sequence[PlannedStep], spec: JobSpec, generation: int) -> Correction:
        """Return the correction of the period that begins with step `first`, which may know units of a former topology."""
        async with self._deciding:
            execution = spec.execution.model_dump_json(exclude_defaults=True)  # the same to a release that knows more fields
            trainers = hashlib.sha256(execution.encode()).hexdigest()[:16]
            if self._known is None or self._known[:2] != (first, trainers):
                correction = await self._load(first, trainers)
                if correction is None:
                    measured = [step for step in committed if step.commits and step.plan and step.plan.generation == generation]
                    fitted = await asyncio.to_thread(self._fit, measured, spec)
                    correction = fitted or await self._load(first - PERIOD_STEPS, trainers) or UNCORRECTED
                    text = json.dumps({"trainers": trainers, **correction.to_document()})
                    await self._store.save_correction(self._job, first, text)
                    correction = Correction.from_document(json.loads(text))  # what is recorded is what counts
                self._known = first, trainers, correction
            return self._known[2]

    async def _load(self, first: int, trainers: str) -> Correction | None:
        """Return the recorded correction of a period; None where there is none for these trainers."""
        text = await self._store.load_correction(self._job, first)
        document = {} if text is None else json.loads(text)
        return Correction.from_document(document) if document.get("trainers") == trainers else None

    def _fit(self, steps: Sequence[PlannedStep], spec: JobSpec) -> Correction | None:
        """Return a correction fitted to these steps; None where they are too few, or their trainers have measured nothing."""
        topology = spec.topology
        execution = execution_of(spec, topology.topology())
        try:
            of_nodes = bool(steps) and steps[-1].formation is not None
            alike = [step for step in steps if (step.formation is not None) == of_nodes]
            observed = {step.index: one for step in alike if (one := observation(step, execution)) is not None}
            if len(observed) < LEAST_STEPS:
                return None
            correction = fit(list(observed.values()), execution, tuple(topology.stages))
            latest = [step for step in alike if step.index in observed][-SIMULATED_STEPS:]
            beside_s = statistics.median(unexplained_s(step, correction, execution) for step in latest)
        except (ValueError, ArithmeticError) as err:  # of numbers from the wire, which must not end a job
            log.warning("costs not corrected %s", pairs(job=self._job, error=err))
            return None
        if not correction.units:
            return None
        scales = {unit: ":".join(f"{scale:.3g}" for scale in lines.scale) for unit, lines in correction.units.items()}
        log.info("costs corrected %s", pairs(job=self._job, steps=len(observed), unexplained_s=beside_s, **scales))
        return replace(correction, unexplained_s=beside_s)
