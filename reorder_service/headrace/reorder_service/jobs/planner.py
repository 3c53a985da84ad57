"""Plans the steps of one job: what their samples are, which replica gets them when, and the tickets of the parts."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from headrace.errors import JobFailedError
from headrace.observability import tracing
from headrace.observability.logs import pairs
from headrace.plan import StepPlan
from headrace.reorder_service.jobs.batch_size import BatchSize
from headrace.reorder_service.jobs.batches import GlobalBatches, content_of
from headrace.reorder_service.jobs.corrections import Corrections
from headrace.reorder_service.jobs.counted_shards import Manifest
from headrace.reorder_service.jobs.formation import Formation
from headrace.reorder_service.jobs.job_execution import where_ranks_meet
from headrace.reorder_service.jobs.part_decoding import Decoding, lots_of
from headrace.reorder_service.jobs.planned_step import PlannedPart, PlannedStep
from headrace.reorder_service.jobs.probing import probe
from headrace.reorder_service.jobs.step_balance import Balance, balance_of
from headrace.reorder_service.jobs.step_history import StepHistory
from headrace.reorder_service.jobs.turns import Turns
from headrace.reorder_service.jobs.work_orders import Orders
from headrace.reorder_service.store.state import JobRecord, StateStore
from headrace.sample import SampleRef
from headrace.spec import JobSpec
from headrace.ticket import make_ticket
from headrace.v1 import common_pb2

log = logging.getLogger(__name__)

_T = TypeVar("_T")

PLACED_AT_A_TIME = 128  # lots of parts handed out before the event loop gets a turn: some ten milliseconds; orders share messages
MOST_PLANNING_S = 600.0  # of a step: no trainer waits for longer, and what headrace.limits allows is planned in a tenth of it
MOST_TRIES = 16  # rows tried to find a substitute; a shard with so many bad samples in a row is no source of good ones


class Planner:
    """Plans the steps of one job whose samples are known. Results of probing are in the store until the step is committed."""

    def __init__(
        self, record: JobRecord, spec: JobSpec, manifest: Manifest, store: StateStore, orders: Orders, history: StepHistory
    ) -> None:
        """`history`: is told how even each plan is."""
        self._history = history
        self._job = record.job
        self._uid = record.uid
        self._key = record.key
        self._spec = spec
        self._manifest = manifest
        self._store = store
        self._orders = orders
        self._corrections = Corrections(record.job, store)
        self._batch_size = BatchSize(spec.window)
        self._turns = Turns()

    @property
    def warning(self) -> str:
        """One sentence on how the job could be planned better; empty if nothing is known that would help."""
        return self._batch_size.warning

    async def step(self, index: int, batches: GlobalBatches, generation: int) -> PlannedStep:
        """Return a new step, of which only the samples are known."""

        def look_up() -> tuple[list[SampleRef], int]:
            refs = batches.refs(index)
            return refs, content_of(refs)

        async with self._turns.turn(index):
            refs, content = await self._in_worker_thread(look_up)
        return PlannedStep(index=index, refs=refs, content=content, trace=f"{self._job}/{self._uid}/{generation}/{index}")

    async def plan(
        self,
        step: PlannedStep,
        spec: JobSpec,
        generation: int,
        committed: Sequence[PlannedStep] = (),
    ) -> None:
        """Probe a step's samples, plan it and cut it into parts. Raises JobFailedError where no preprocessor can probe them.

        `spec`: as the job is planned now. The plan is for its topology's replicas, so that the parts are the same whoever plans
        the step; `plan_again` makes that for the pipelines of nodes. `committed`: the latest steps, by which costs are corrected.
        """
        async with self._turns.turn(step.index):  # steps that are planned side by side would all be late
            if is_probed := await self._recall(step):
                plan = await self._first_plan(step, spec, generation, committed)
                await self._cut(step, plan, generation)
        if not is_probed:
            saving = await self._probe(step)
            try:
                async with self._turns.turn(step.index):
                    plan = await self._first_plan(step, spec, generation, committed)
            finally:
                await saving  # nobody may hear of a plan before the store has what it was made from
            async with self._turns.turn(step.index):
                await self._cut(step, plan, generation)
        log.info(
            "planned %s",
            pairs(
                job=self._job,
                step=step.index,
                samples=len(step.probes),
                rejected=len(step.rejected),
                substitutes=len(step.substitutes),
                parts=len(step.parts),
                bubble=plan.predicted.bubble if plan.predicted else 0.0,
            ),
        )
        if self._batch_size.add(step.costs):
            async with self._turns.turn(step.index):
                await self._in_worker_thread(self._batch_size.judge, spec)
            if self.warning:
                log.warning("could be planned better %s", pairs(job=self._job, why=self.warning))

    async def plan_again(self, step: PlannedStep, spec: JobSpec, generation: int, formation: Formation | None) -> None:
        """Plan a planned step for other pipelines. Its samples and its parts stay as they are."""
        async with self._turns.turn(step.index):
            plan = await self._make(step, spec, generation, formation)
            await self._in_planning(step, plan.check)
        step.adopt(plan, formation)  # in the event loop, which serializes plans
        log.info(
            "planned again %s",
            pairs(
                job=self._job,
                step=step.index,
                nodes_generation=formation.generation if formation is not None else 0,
                pipelines=len(plan.replicas),
                bubble=plan.predicted.bubble if plan.predicted else 0.0,
            ),
        )

    async def _in_worker_thread(self, work: Callable[..., _T], *args: Any, most_s: float | None = None) -> _T:
        """Do some work in a worker thread. Raises TimeoutError where the thread takes longer than `most_s`; None: no limit.

        What the work waits for before, a careful leader's turn or a thread that is free, takes as long as other jobs do.
        """
        loop = asyncio.get_running_loop()
        async with self._store.fatal_jobs.guard_planning(self._job), asyncio.timeout(None) as limit:

            def begin() -> None:
                with contextlib.suppress(RuntimeError):  # nobody waits for the work any more
                    limit.reschedule(None if most_s is None else loop.time() + most_s)

            def do() -> _T:
                loop.call_soon_threadsafe(begin)
                return work(*args)

            return await asyncio.to_thread(do)

    async def _recall(self, step: PlannedStep) -> bool:
        """Fill in what the store knows of the step's samples, and return whether it knows them."""
        if (found := await self._store.load_probes(self._job, step.index)) is None:
            return False
        step.probes, step.rejected, substitutes = found
        step.substitutes = {ref.sample_id: ref for ref in substitutes}
        return True

    async def _probe(self, step: PlannedStep) -> asyncio.Task[None]:
        """Have the step's samples probed, and return a task that saves what is known of them then."""
        answers: list[common_pb2.Probe] = []
        step.rejected = await probe(step, step.refs, self._job, self._orders, answers)
        await self._substitute(step, answers)
        saved = self._store.save_probes(self._job, step.index, answers, step.rejected, step.substitutes.values())
        return asyncio.create_task(saved)

    async def _first_plan(self, step: PlannedStep, spec: JobSpec, generation: int, committed: Sequence[PlannedStep]) -> StepPlan:
        step.sample_ids = np.array(sorted(step.probes), dtype=np.int64)
        step.correction = await self._corrections.of_step(step.index, committed, spec, generation)
        return await self._make(step, spec, generation, None)

    async def _cut(self, step: PlannedStep, plan: StepPlan, generation: int) -> None:
        """Have the step take its first plan, and cut it into parts."""

        def ticket(part: str) -> str:
            return make_ticket(self._job, f"{self._uid}/{generation}/{part}", self._key)

        source_of = self._manifest.source_number if len(self._spec.sources) > 1 else None
        cut = functools.partial(step.cut, part_samples=self._spec.part_samples, ticket=ticket, source_of=source_of)
        await self._in_planning(step, cut, plan)

    async def _make(self, step: PlannedStep, spec: JobSpec, generation: int, formation: Formation | None) -> StepPlan:
        """Plan a probed step in a worker thread. Raises JobFailedError where that fails."""
        vocab = self._manifest.vocabulary.size if self._manifest.vocabulary else 0

        def make() -> tuple[StepPlan, Balance | None]:
            plan = step.make_plan(spec, spec.topology, formation, vocab=vocab, generation=generation)
            return plan, balance_of(plan, step.sample_ids, step.costs, where_ranks_meet(spec.execution))

        with tracing.span("plan", step.trace, samples=len(step.probes)):
            plan, balance = await self._in_planning(step, make)
        self._history.note_plan(step.index, balance)
        return plan

    async def _in_planning(self, step: PlannedStep, work: Callable[..., _T], *args: Any) -> _T:
        """Do a part of a step's planning in a worker thread.

        Raises JobFailedError where it raises ValueError, and where it takes longer than MOST_PLANNING_S. Its thread, which
        cannot be ended, then works on beside the other jobs until it is done.
        """
        try:
            return await self._in_worker_thread(work, *args, most_s=MOST_PLANNING_S)
        except TimeoutError as err:
            raise JobFailedError(
                f"planning step {step.index} of job {self._job!r} takes more than {MOST_PLANNING_S:g} s: lower global_batch or "
                "the topology's replicas, microbatches or stages in a new job, or choose another strategy"
            ) from err
        except ValueError as err:
            raise JobFailedError(f"step {step.index} of job {self._job!r} cannot be planned: {err}") from err

    async def hand_out(
        self,
        step: PlannedStep,
        num_members: int,
        *,
        on_placed: Callable[[PlannedPart], None],
        on_failed: Callable[[str], None],
        urgent: Callable[[], bool],
        wanted: Callable[[], bool],
    ) -> None:
        """Have all parts of a planned step decoded that are not yet, by so many preprocessors. Functions as in `Decoding`."""
        decoding = Decoding(self._orders, step.index, on_placed=on_placed, on_failed=on_failed, urgent=urgent, wanted=wanted)
        parts = (part for part in step.parts.values() if part.work is None)
        lots = lots_of(parts, most_samples=self._spec.part_samples, num_members=num_members)
        for number, lot in enumerate(lots, 1):
            if number % PLACED_AT_A_TIME == 1:
                await asyncio.sleep(0)  # lets plans go out and messages be handled
            decoding.submit(lot)

    async def _substitute(self, step: PlannedStep, answers: list[common_pb2.Probe]) -> None:
        """Find good samples for the places of refused ones, where their source asks for substitutes. `answers`: as in `probe`."""
        asking = {source.name for source in self._spec.sources if source.on_bad == "substitute"}
        empty = [ref for ref in step.refs if ref.sample_id not in step.probes and self._manifest.source_of(ref.shard) in asking]
        for distance in range(1, MOST_TRIES + 1):
            tried = [self._manifest.successor(ref, distance) for ref in empty]
            await probe(step, tried, self._job, self._orders, answers)  # what is refused here is quarantined at its own place
            step.substitutes |= {ref.sample_id: ref for ref in tried if ref.sample_id in step.probes}
            empty = [ref for ref in empty if ref.sample_id not in step.probes]
