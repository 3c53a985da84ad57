"""Where a job stands: its state, its window of planned steps, what the ranks have committed of them, and its progress so far."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence

from headrace.errors import ConflictError, UserError
from headrace.observability import metrics, tracing
from headrace.observability.logs import pairs
from headrace.quarantine import Reason, Rejected
from headrace.reorder_service.jobs.batches import GlobalBatches
from headrace.reorder_service.jobs.planned_step import PlannedPart, PlannedStep, RankCommit
from headrace.reorder_service.jobs.sessions import Session
from headrace.reorder_service.jobs.step_history import StepHistory
from headrace.reorder_service.store.finished_jobs import FINAL
from headrace.reorder_service.store.progress import StepRecord
from headrace.reorder_service.store.state import JobRecord, StateStore

log = logging.getLogger(__name__)

RECENT_PLANS = 16  # committed steps whose plans can still be shown
RECENT_SAMPLES = 1 << 19  # in all of these plans together: one of 80,000 samples takes some 100 MB


class Cursor:
    """How far one job has come. It moves only while `moving` is held."""

    def __init__(self, record: JobRecord, window: int, batches: GlobalBatches, store: StateStore) -> None:
        """`window`: most steps that are planned ahead."""
        self.uid = record.uid
        self.generation = record.generation
        """Generation of the plans that ranks hold: every change of the topology and every reset begins a new one."""
        self.state = record.state
        self.message = record.message
        self.committed = self.next_step = record.cursor
        """`committed`: number of committed steps. `next_step`: the first step that nobody has begun to plan."""
        self.awaited_step = 0
        """A later step whose samples are asked for, to compare them with those of a trainer's state."""
        self.progress = record.progress
        self.quarantined: Counter[Reason] = Counter()
        """Samples that were refused in steps committed since the job was loaded."""
        self.steps: dict[int, PlannedStep] = {}
        """The steps that are not committed, as far as their planning has begun."""
        self.recent: deque[PlannedStep] = deque(maxlen=RECENT_PLANS)
        self.history = StepHistory()
        self.moving = asyncio.Lock()
        """Held while the cursor moves, forwards or back, and while anything changes that it must not pass meanwhile."""
        self._job = record.job
        self._window = window
        self._batches = batches
        self._store = store
        self._news = asyncio.Condition()  # notified whenever a step is planned or committed, and at the end

    @property
    def is_over(self) -> bool:
        """Whether the job is done, failed or cancelled."""
        return self.state in FINAL

    @property
    def is_broken_off(self) -> bool:
        """Whether the job has failed or was cancelled: it goes neither on nor back."""
        return self.state in ("FAILED", "CANCELLED")

    @property
    def cancellation(self) -> str:
        """What ranks and users are told of the job when it is cancelled."""
        again = f"submit it by another name, or again after `headrace job delete {self._job}`"
        return f"job {self._job!r} was cancelled: {again}"

    def check_goes_on(self, refusal: str) -> None:
        """Raise ConflictError, whose sentence ends with `refusal`, where the job is over."""
        if self.is_over:
            again = f"; after `headrace job reset {self._job} --step N` it goes on" if self.state == "DONE" else ""
            raise ConflictError(f"job {self._job!r} is {self.state}: {refusal}{again}")

    def check_reached(self, step: int) -> None:
        """Raise UserError for a negative step, and ConflictError for one that is ahead of the last commit."""
        if step < 0:
            raise UserError(f"job {self._job!r} cannot go back to step {step}: steps count from 0")
        if step > self.committed:
            reached = f"it has committed only {self.committed}: name a step up to that"
            raise ConflictError(f"job {self._job!r} cannot go back to step {step}: {reached}")

    @property
    def num_steps(self) -> int:
        """Number of steps of the job; 0 until it is known."""
        return self.committed if self.state == "DONE" else self._batches.num_steps

    @property
    def is_at_end(self) -> bool:
        """Whether every step is committed."""
        return 0 < self.num_steps <= self.committed

    @property
    def sizes(self) -> list[int | None]:
        """The bytes of each uncommitted step whose planning has begun; None while they are not known."""
        return [step.num_bytes if (step := self.steps.get(i)) else None for i in range(self.committed, self.next_step)]

    @property
    def planned(self) -> list[PlannedStep]:
        """The planned steps that are not committed, in order."""
        return [step for _, step in sorted(self.steps.items()) if step.plan is not None]

    @property
    def step_times(self) -> tuple[float, float]:
        """The means of the forecast and the measured seconds of the latest committed steps that were forecast; zeros without."""
        forecast = [step for step in self.recent if step.is_compared]
        count = max(1, len(forecast))
        return sum(step.forecast_s for step in forecast) / count, sum(step.measured_s for step in forecast) / count

    def find_part(self, ticket: str) -> PlannedPart | None:
        """Return the part with a ticket; None where no uncommitted step has it."""
        return next((part for step in self.steps.values() if (part := step.parts.get(ticket)) is not None), None)

    def set_to(self, record: JobRecord) -> None:
        """Go to where the job stands in the store."""
        self.state, self.message, self.committed, self.progress = record.state, record.message, record.cursor, record.progress
        self.generation = record.generation
        self.history.cut(record.cursor)

    def end(self, state: str, message: str) -> None:
        """Note the job's end, with a sentence for its ranks. One that was cancelled is never resumed: its plans are dropped."""
        self.state, self.message = state, message
        if state == "CANCELLED":
            self.drop_steps()

    def drop_steps(self) -> None:
        """Drop the steps that are not committed, of whose parts the fleet keeps nothing from now on."""
        for step in self.steps.values():
            step.take_works()  # a part and its work refer to each other: so their memory is free without a garbage collection
        self.steps.clear()

    async def notify(self) -> None:
        """Wake all who wait for a plan or a commit, since a step was planned or the job has changed."""
        async with self._news:
            self._news.notify_all()

    async def note(self, session: Session, index: int, commit: RankCommit) -> bool:
        """Note that one rank has applied step `index`; return False where the step is in the ledger already.

        After a restart of this service a rank may commit a step before it is planned again: then this waits for the plan. Raises
        the session's error where that is over, and ConflictError where the step is not planned.
        """
        if not self.can_judge(session, index):
            async with self._news:
                await self._news.wait_for(lambda: self.can_judge(session, index))
        if session.over is not None:
            raise session.over
        if index < self.committed:
            return False
        step = self.steps.get(index)
        if self.is_over or step is None or step.plan is None:
            raise ConflictError(self.message or f"step {index} of job {self._job!r} is not planned")
        if commit.content not in (0, step.content):
            raise ConflictError(
                f"rank {session.rank} has trained other samples in step {index} than job {self._job!r} has there, as after a "
                f"change of weights that its store has lost: load the checkpoint of step {self.committed} or of an earlier one"
            )
        step.commits[session.rank] = commit
        session.next_step, session.data_wait_s, session.step_s = index + 1, commit.data_wait_s, commit.step_s
        return True

    def can_judge(self, session: Session, index: int) -> bool:
        """Return whether a commit of step `index` need not wait for a plan: there is one, or none will come for this session."""
        step = self.steps.get(index)
        to_come = self.committed <= index < self.committed + self._window and not 0 < self.num_steps <= index
        planned = step is not None and step.plan is not None
        return planned or not to_come or session.over is not None or self.is_over

    async def first_planned(self) -> None:
        """Wait until an uncommitted step is planned, or the job is over."""
        async with self._news:
            await self._news.wait_for(lambda: bool(self.planned) or self.is_over)

    def forget_commits(self, rank: int | None = None) -> None:
        """Forget what a rank has committed of steps that are not in the ledger; None: what all ranks have."""
        for step in self.steps.values():
            if rank is None:
                step.commits.clear()
            else:
                step.commits.pop(rank, None)

    async def committed_by_all(self, session: Session, index: int) -> None:
        """Wait until the step is in the ledger, or the job or the session has ended."""
        async with self._news:
            await self._news.wait_for(lambda: index < self.committed or self.is_over or session.over is not None)

    async def save(self, step: PlannedStep, record: StepRecord, rejected: Sequence[Rejected]) -> None:
        """Save the next committed step. Raises ConflictError where it is not the next one, or the job is not as it was."""
        known = ("uid", self.uid), ("generation", self.generation)
        await self._store.commit_step(self._job, step.index, record, rejected, *known)

    def may_advance(self, num_ranks: int) -> bool:
        """Return whether all ranks have committed the first uncommitted step."""
        step = self.steps.get(self.committed)
        return step is not None and len(step.commits) >= num_ranks

    async def advance(self, source_of: Callable[[int], str]) -> PlannedStep:
        """Commit the first uncommitted step, which every rank has committed, and return it. Must not be cancelled.

        `source_of`: returns a shard's source. Raises ConflictError where the store has lost commits.
        """
        step = self.steps[self.committed]
        record, rejected = step.record(source_of)
        with tracing.span("commit", step.trace, samples=len(record.samples)):
            await self.save(step, record, rejected)
        for item in rejected:
            self.quarantined[item.reason] += 1
            metrics.QUARANTINED_SAMPLES.labels(item.reason).inc()
            level = logging.DEBUG if item.reason is Reason.FILTERED else logging.WARNING
            log.log(level, "quarantined %s", pairs(job=self._job, sample=item.name, reason=item.reason, detail=item.detail))
        del self.steps[step.index]
        self.recent.append(step)
        self.history.add(step, record)
        while len(self.recent) > 1 and sum(len(kept.refs) for kept in self.recent) > RECENT_SAMPLES:
            self.recent.popleft()
        self.committed += 1
        self.progress = self.progress.after(record)
        metrics.COMMITTED_STEPS.inc()
        metrics.COMMITTED_SAMPLES.inc(len(record.samples))
        if step.is_compared:
            metrics.STEP_SECONDS.labels("forecast").observe(step.forecast_s)
            metrics.STEP_SECONDS.labels("measured").observe(step.measured_s)
        tracing.ended(tracing.ROOT, step.trace, step.began_s, samples=len(record.samples))
        times = {"forecast_s": _known(step.forecast_s), "measured_s": _known(step.measured_s)}
        log.info("committed %s", pairs(job=self._job, step=step.index, samples=len(record.samples), loss=record.loss, **times))
        return step


def _known(seconds: float) -> float | None:
    return None if math.isnan(seconds) else seconds
