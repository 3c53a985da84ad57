"""A running job: lists its shards, keeps a window of planned steps ahead of the trainers, commits steps."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Awaitable, Collection, Mapping

from headrace.errors import (
    ConflictError,
    HeadraceError,
    JobFailedError,
    SupersededError,
    UnavailableError,
    UserError,
    first_error,
    lost_commits,
)
from headrace.observability import tracing
from headrace.observability.logs import pairs
from headrace.reorder_service.fleet.fleet import Fleet
from headrace.reorder_service.jobs import fleet_messages
from headrace.reorder_service.jobs.batches import Layout
from headrace.reorder_service.jobs.counted_shards import Manifest
from headrace.reorder_service.jobs.indexing import Indexing
from headrace.reorder_service.jobs.planned_step import RankCommit, Step
from headrace.reorder_service.jobs.planner import Planner
from headrace.reorder_service.jobs.sessions import Session, Sessions
from headrace.reorder_service.jobs.stopping import stop_task
from headrace.reorder_service.jobs.window import bytes_ahead, has_room
from headrace.reorder_service.jobs.work_orders import Orders
from headrace.reorder_service.store.state import FINAL, JobRecord, StateStore
from headrace.reorder_service.store.store_retry import STORE_RETRY_S
from headrace.spec import JobSpec, TopologySpec, load_spec_json, load_topology_json

log = logging.getLogger(__name__)

PLACED_AT_A_TIME = 512  # parts handed out before the event loop gets a turn: tens of milliseconds; orders share messages
RECENT_PLANS = 16  # committed steps whose plans can still be shown


class JobRun:
    """A job that this process holds in memory; `start` runs it. What must survive the process is in the store."""

    def __init__(self, record: JobRecord, store: StateStore, fleet: Fleet) -> None:
        self.name = record.job
        self.key = record.key
        self.spec: JobSpec = load_spec_json(record.spec_json)
        self.state = record.state
        self.message = record.message
        self.paused = record.paused
        self.committed = self.next_step = record.cursor
        """`committed`: number of committed steps. `next_step`: the first step that nobody has begun to plan."""
        self.progress = record.progress
        self.manifest = Manifest(record, self.spec, store)
        self.generation = record.generation
        """Generation of the plans that ranks hold: every change of the topology and every reset begins a new one."""
        self.topology = load_topology_json(record.topology_json) if record.topology_json else self.spec.topology
        self.layout = Layout(self.spec, self.manifest, record.mixture)
        self.steps: dict[int, Step] = {}
        self.recent: deque[Step] = deque(maxlen=RECENT_PLANS)
        self.sessions = Sessions(self.name)
        self._store = store
        self._fleet = fleet
        self._orders = Orders(self.name, self.spec.share, fleet, self.manifest, lambda: self.sessions.share_parts)
        self._planner = Planner(record, self.spec, self.manifest, store, self._orders)
        self._order_error = ""
        self._changed = asyncio.Event()
        self._ready = asyncio.Event()
        self._planned = asyncio.Condition()  # notified whenever a step is planned or committed, and at the end
        self._committing = asyncio.Lock()  # held while the cursor moves, forwards or back
        self._task: asyncio.Task[None] | None = None

    @property
    def num_steps(self) -> int:
        """Number of steps of the job; 0 until it is known."""
        return self.committed if self.state == "DONE" else self.layout.num_steps

    # -- life cycle ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Run in the background until the job is done, failed or cancelled."""
        if self.state in FINAL:
            self._ready.set()
        else:
            self._task = asyncio.create_task(self._run(), name=f"job {self.name}")

    async def wait_ready(self) -> None:
        """Wait until the job's next samples are known, or it is over."""
        await self._ready.wait()

    async def stop(self) -> None:
        """Stop working on the job. Its state stays as it is, and preprocessors keep the parts that they hold."""
        await stop_task(self._task)
        self._task = None

    async def cancel(self) -> None:
        """Cancel the job, unless it has ended already; it cannot be resumed."""
        async with self._committing:
            if self.state not in FINAL:
                await self.stop()
                try:
                    await self._end("CANCELLED", f"job {self.name!r} was cancelled")
                finally:
                    self.start()  # the job goes on where the store did not save its end

    async def resubmit(self) -> None:
        """Resume a failed job from its last commit, since what made it fail may be mended. Any other job stays as it is."""
        async with self._committing:
            if self.state == "FAILED":
                await self._store.set_state(self.name, "INDEXING")
                self.state, self.message, self._order_error = "INDEXING", "", ""
                self.steps.clear()
                self.sessions.end_all(SupersededError(f"job {self.name!r} was submitted again"))
                self._ready.clear()
                log.info("resubmitted %s", pairs(job=self.name, step=self.committed))
                self.start()

    async def rewind(self, step: int, catch_up: int = 0) -> None:
        """Go back to `step`: its commit and all later ones are undone.

        `catch_up`: how many steps `step` may lie ahead of the last commit. Nothing is undone then: the rank commits them again.
        Ranks that go back to the same step may all call this: the first call does it. Must be shielded from cancellation.

        A job that has failed or was cancelled stays as it is. Raises UserError where `step` is negative, and ConflictError where
        it lies further ahead than `catch_up`.
        """
        if step < 0:
            raise UserError(f"job {self.name!r} cannot go back to step {step}: steps count from 0")
        async with self._committing:
            if step > self.committed + catch_up:
                raise ConflictError(lost_commits(self.name, step, self.committed))
            if step >= self.committed or self.state in ("FAILED", "CANCELLED"):
                return
            await self._restarted(self._store.rewind(self.name, step), f"reset to step {step}")
        await self._notify()

    async def set_topology(self, topology: TopologySpec, generation: int | None = None) -> None:
        """Plan the same global batches for another topology, from the first uncommitted step on. All ranks must open anew.

        `generation`: the job's generation as the caller knows it. Raises ConflictError where that or the job is over, and
        SpecError where the job's model lacks units of the topology.
        """
        self.spec.with_topology(topology)
        async with self._committing:
            if generation not in (None, self.generation):
                raise ConflictError(f"job {self.name!r} is in generation {self.generation}, not {generation}: look again")
            if self.state in FINAL:
                raise ConflictError(f"job {self.name!r} is {self.state}: its topology cannot change any more")
            if topology != self.topology:
                stored = self._store.set_topology(self.name, topology.model_dump_json(), self.generation + 1)
                await self._restarted(stored, "planned anew for another topology")
        await self._notify()

    async def set_weights(self, step: int, weights: Mapping[str, float]) -> None:
        """Mix the sources by other weights from `step` on. The change is recorded, so a job that is reset or resumed repeats it.

        Raises UserError for invalid weights, ConflictError where the step is planned already or the job is over.
        """
        async with self._committing:
            if self.state in FINAL:
                raise ConflictError(f"job {self.name!r} is {self.state}: its mixture cannot change any more")
            if step < self.next_step:
                raise ConflictError(f"steps before {self.next_step} of job {self.name!r} are planned already; name a later one")
            changes = self.layout.changed(step, weights)
            await self._store.set_mixture(self.name, changes)
            log.info("mixture changed %s", pairs(job=self.name, from_step=step, weights=json.dumps(dict(weights))))
            self.layout.changes = changes
            if self.manifest.vocabulary is not None:
                self.layout.lay_out()
                self._changed.set()

    async def pause(self, paused: bool) -> None:
        """Pause or resume planning; steps that are planned can still be consumed. Raises ConflictError where the job is over."""
        if self.state in FINAL:
            raise ConflictError(f"job {self.name!r} is {self.state}: it cannot be paused or resumed")
        await self._store.set_paused(self.name, paused)
        self.paused = paused
        self._changed.set()
        log.info("%s %s", "paused" if paused else "resumed", pairs(job=self.name, step=self.committed))

    async def _restarted(self, change: Awaitable[object], what: str) -> None:
        """Stop the job, await `change`, its change in the store, and go on from there. The caller must hold `_committing`."""
        await self.stop()
        self._fleet.close_job(self.name, fleet_messages.job_closed(self.name))
        self.steps.clear()
        try:
            await change
            record = await self._store.load_job(self.name)
            log.info("changed %s", pairs(job=self.name, what=what, step=record.cursor, generation=record.generation))
            self.state, self.message, self.committed, self.progress = record.state, record.message, record.cursor, record.progress
            self.generation = record.generation
            self.topology = load_topology_json(record.topology_json) if record.topology_json else self.spec.topology
            self.sessions.end_all(self._stale(f"was {what}"))
        finally:
            self.start()

    def _stale(self, why: str = "has gone on") -> SupersededError:
        return SupersededError(f"job {self.name!r} {why}: it is in generation {self.generation} now; connect again")

    async def _run(self) -> None:
        failure = ""
        while self.state not in FINAL:
            try:
                if failure:
                    await self._end("FAILED", failure)
                else:
                    await self._work()
            except* UnavailableError as group:
                log.warning("waiting for the store %s", pairs(job=self.name, error=first_error(group)))
                await asyncio.sleep(STORE_RETRY_S)
            except* HeadraceError as group:
                failure = str(first_error(group))
            except* Exception:
                log.exception("job failed on an internal error %s", pairs(job=self.name))
                failure = "internal error; see the reorder service's log"

    async def _work(self) -> None:
        """Work on the job from wherever it stands to its end. May be called again after an error."""
        if self.manifest.vocabulary is None:
            await self.manifest.list_shards(self._orders.ask_once)  # without retries, so that a wrong path is reported at once
        self.layout.lay_out()
        await self._feed()

    async def _end(self, state: str, message: str = "") -> None:
        await self._store.set_state(self.name, state, message)
        self.state, self.message = state, message
        log.info("job ended %s", pairs(job=self.name, state=state, steps=self.committed, message=message))
        self._fleet.close_job(self.name, fleet_messages.job_closed(self.name))
        for session in self.sessions.by_rank.values():
            session.tell_end(message)
        self._ready.set()
        await self._notify()

    async def _notify(self) -> None:
        async with self._planned:
            self._planned.notify_all()

    # -- the window ---------------------------------------------------------------------------------------------------

    async def _feed(self) -> None:
        """Keep the window full of planned steps, until every step is committed."""
        self.next_step = self.committed
        indexing = Indexing(self.manifest, self.layout, self._orders.ask, self._changed.set)
        async with asyncio.TaskGroup() as group:
            while not 0 < self.num_steps <= self.committed:
                if self._order_error:
                    raise JobFailedError(self._order_error)
                if not self._ready.is_set() and not self.layout.to_count(self.committed):
                    await self._begin()
                while self._may_plan():
                    group.create_task(self._prepare(self.next_step))
                    self.next_step += 1
                indexing.go_on(group, self.next_step)
                self._changed.clear()
                await self._changed.wait()
            indexing.stop()
        if not self.progress.samples:
            raise JobFailedError(f"every sample of job {self.name!r} was refused; `headrace inspect` shows why")
        await self._end("DONE")

    async def _begin(self) -> None:
        self.state = "RUNNING"
        await self._store.set_state(self.name, self.state)
        shards, indexed = len(self.manifest.shards), self.manifest.num_counted
        log.info("began %s", pairs(job=self.name, shards=shards, indexed=indexed, steps=self.num_steps))
        self._ready.set()

    @property
    def window_bytes(self) -> int:
        """How many bytes of decoded steps may be planned ahead; 0: no limit, see `bytes_ahead`."""
        return bytes_ahead(self.spec.window_bytes, self._fleet.stores_bytes)

    def _may_plan(self) -> bool:
        """Return whether to plan the next step: the job has it and is not paused, its samples are known, the window has room."""
        sizes = [step.num_bytes if (step := self.steps.get(i)) else None for i in range(self.committed, self.next_step)]
        room = has_room(sizes, window=self.spec.window, window_bytes=self.window_bytes)
        return room and not self.paused and self.layout.knows(self.next_step)

    async def _prepare(self, index: int) -> None:
        """Probe, plan and hand out one global batch, unless that was done before an error of the store."""
        if (known := self.steps.get(index)) is not None and known.plan is not None:
            return
        refs = await self._planner.aside(self.layout.refs, index)
        step = self.steps[index] = self._planner.step(index, refs, self.generation)
        await self._planner.plan(step, self.topology, self.generation)
        self._changed.set()  # the size of the step is known now: the window may have room
        self.sessions.tell_step(step)

        def urgent() -> bool:
            return step.index == self.committed

        for number, part in enumerate(step.parts.values(), 1):
            if number % PLACED_AT_A_TIME == 1:
                await asyncio.sleep(0)  # lets plans go out and messages be handled
            self._orders.decode(
                step.index,
                part,
                on_placed=self.sessions.tell_place,
                on_failed=self._order_failed,
                urgent=urgent,
                wanted=lambda: self.steps.get(step.index) is step and self.state not in FINAL,
            )
        await self._notify()

    def _order_failed(self, error: str) -> None:
        self._order_error = error
        self._changed.set()

    # -- trainers -----------------------------------------------------------------------------------------------------

    def open_session(
        self, rank: int, num_ranks: int, generation: int | None = None, replicas: Collection[int] = (), *, together: bool = False
    ) -> Session:
        """Open a session for a rank, which is first told what is planned already.

        `replicas`: those that the rank names (`named` of `Sessions.open`). `generation`: that of a former session that this one
        continues; None: a new process. `together`: as for `Sessions.open`.

        Raises as `Sessions.open`, and SupersededError where `generation` is over.
        """
        if generation not in (None, self.generation):
            raise self._stale()
        former = self.sessions.num_ranks
        session = self.sessions.open(rank, num_ranks, self.topology.replicas, replicas, together=together)
        session.next_step = self.committed
        for step in self.steps.values():
            if self.sessions.num_ranks != former:  # the earlier commits of a rank were for other samples
                step.commits.clear()
            elif generation is None and not together:  # the model of a new process may lack what the former one had applied
                step.commits.pop(rank, None)
        session.tell_planned([step for _, step in sorted(self.steps.items()) if step.plan is not None])
        if self.state in FINAL:
            session.tell_end(self.message)
        return session

    def report_lost(self, ticket: str, lease: str) -> None:
        """Have a part decoded again, since a rank could not fetch it from where `lease` put it. Ignored for a former lease."""
        for step in self.steps.values():
            part = step.parts.get(ticket)
            if part is not None and part.lease == lease:
                log.info("part lost %s", pairs(job=self.name, part=part.name, endpoint=part.endpoint))
                part.agreed.is_missed = True
                self._fleet.lost(lease)

    async def commit(self, session: Session, index: int, commit: RankCommit) -> bool:
        """Note that one rank has applied step `index`; return whether all have and the step is in the ledger.

        Repeating a commit is harmless. After a restart of this service a rank may commit a step before it is planned again: then
        this waits for the plan. Raises the session's error where that is over, and ConflictError where the step is not planned.
        """
        async with self._planned:
            await self._planned.wait_for(lambda: self._can_judge(session, index))
        if session.over is not None:
            raise session.over
        if index < self.committed:
            return True
        step = self.steps.get(index)
        if self.state in FINAL or step is None or step.plan is None:
            raise ConflictError(self.message or f"step {index} of job {self.name!r} is not planned")
        step.commits[session.rank] = commit
        session.next_step, session.data_wait_s, session.step_s = index + 1, commit.data_wait_s, commit.step_s
        await asyncio.shield(self._commit_ready())
        return index < self.committed

    async def committed_by_all(self, session: Session, index: int) -> None:
        """Wait until the step is in the ledger, or the job or the session has ended."""
        async with self._planned:
            await self._planned.wait_for(lambda: index < self.committed or self.state in FINAL or session.over is not None)

    def _can_judge(self, session: Session, index: int) -> bool:
        """Return whether a commit of step `index` need not wait for a plan: there is one, or none will come for this session."""
        step = self.steps.get(index)
        to_come = self.committed <= index < self.committed + self.spec.window and not 0 < self.num_steps <= index
        planned = step is not None and step.plan is not None
        return planned or not to_come or session.over is not None or self.state in FINAL

    async def _commit_ready(self) -> None:
        """Commit, in order, the steps that every rank has committed. Must not be cancelled between updating store and memory."""
        async with self._committing:
            while (head := self.steps.get(self.committed)) and len(head.commits) >= self.sessions.num_ranks:
                try:
                    await self._commit_head(head)
                except ConflictError:  # the ranks are ahead of the store and must be told
                    await self._restarted(asyncio.sleep(0), f"set back from step {self.committed}, as its store lost commits")
                await self._notify()

    async def _commit_head(self, step: Step) -> None:
        record, rejected = step.record(self.manifest.source_of)
        with tracing.span("commit", step.trace, samples=len(record.samples)):
            await self._store.commit_step(self.name, step.index, record, rejected)
        for item in rejected:
            log.warning("quarantined %s", pairs(job=self.name, sample=item.name, reason=item.reason, detail=item.detail))
        del self.steps[step.index]
        self.recent.append(step)
        self.committed += 1
        self.progress = self.progress.after(record)
        tracing.ended(tracing.ROOT, step.trace, step.began_s, samples=len(record.samples))
        log.info("committed %s", pairs(job=self.name, step=step.index, samples=len(record.samples), loss=record.loss))
        if sentence := self.progress.judged(self.spec.sources):
            self._order_failed(sentence)
        self._fleet.broadcast(self.name, fleet_messages.step_committed(self.name, step.index))
        self._fleet.release([part.work for part in step.parts.values() if part.work is not None])
        self._changed.set()
