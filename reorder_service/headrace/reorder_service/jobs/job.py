"""A running job: lists its shards, keeps a window of planned steps ahead of the trainers, commits steps."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Collection, Mapping, Sequence

from headrace.errors import ConflictError, HeadraceError, JobFailedError, SupersededError, UnavailableError, first_error
from headrace.execution_spec import ExecutionSpec
from headrace.limits import MAX_NODES
from headrace.observability.logs import pairs
from headrace.plan import LLM
from headrace.reorder_service.fleet.fleet import Fleet
from headrace.reorder_service.jobs import fleet_messages
from headrace.reorder_service.jobs.batches import GlobalBatches
from headrace.reorder_service.jobs.counted_shards import Manifest
from headrace.reorder_service.jobs.cursor import Cursor
from headrace.reorder_service.jobs.formation import Formation, formation_of
from headrace.reorder_service.jobs.indexing import Indexing
from headrace.reorder_service.jobs.job_execution import check_coefficients, planned_spec, submitted_spec
from headrace.reorder_service.jobs.planned_step import PlannedStep, RankCommit
from headrace.reorder_service.jobs.planner import Planner
from headrace.reorder_service.jobs.resuming import Resuming
from headrace.reorder_service.jobs.rewriting import Loss, write_again
from headrace.reorder_service.jobs.sessions import Session, Sessions
from headrace.reorder_service.jobs.stopping import stop_task, to_its_end
from headrace.reorder_service.jobs.window import bytes_ahead, has_room
from headrace.reorder_service.jobs.work_orders import Orders
from headrace.reorder_service.store.state import JobRecord, StateStore
from headrace.reorder_service.store.store_retry import STORE_RETRY_S
from headrace.spec import JobSpec
from headrace.topology_spec import TopologySpec

log = logging.getLogger(__name__)


class JobRun:
    """A job that this process holds in memory; `start` runs it. What must survive the process is in the store."""

    def __init__(self, record: JobRecord, store: StateStore, fleet: Fleet) -> None:
        self.name = record.job
        self.key = record.key
        self.spec: JobSpec = submitted_spec(record)
        self.paused = record.paused
        self.manifest = Manifest(record, self.spec, store)
        self.planned_spec = planned_spec(record)
        """The spec with the topology and the execution that the uncommitted steps are planned for."""
        self.formations: Sequence[Formation] = ()
        """The pipelines of nodes that the uncommitted steps are planned for; empty where the job has no nodes."""
        self.batches = GlobalBatches(self.spec, self.manifest, record.mixture)
        self.cursor = Cursor(record, self.spec.window, self.batches, store)
        self.sessions = Sessions(self.name)
        self.resuming = Resuming(self.name, self.cursor, self.sessions, self.batches, lambda: self._changed.set())
        self._store = store
        self._fleet = fleet
        self._orders = Orders(self.name, self.spec.share, fleet, self.manifest, lambda: self.sessions.share_parts)
        self._planner = Planner(record, self.spec, self.manifest, store, self._orders, self.cursor.history)
        self._order_error = ""
        self._planning_again = asyncio.Lock()
        self._changed, self._ready = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def generation(self) -> int:
        """Generation of the plans that ranks hold; see `Cursor.generation`."""
        return self.cursor.generation

    # -- life cycle ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Run in the background until the job is done, failed or cancelled."""
        if self.cursor.is_over:
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
        async with self.cursor.moving:
            if not self.cursor.is_over:
                await self.stop()
                try:
                    await self._end("CANCELLED", self.cursor.cancellation)
                finally:
                    self.start()  # the job goes on where the store did not save its end

    async def resubmit(self) -> None:
        """Resume a failed job from its last commit, since what made it fail may be mended. Any other job stays as it is."""
        async with self.cursor.moving:
            if self.cursor.state == "FAILED":
                anew = self.manifest.is_unusable and not self.cursor.committed
                await (self.manifest.forget() if anew else self._store.set_state(self.name, "INDEXING"))
                self.cursor.state, self.cursor.message, self._order_error = "INDEXING", "", ""
                self.cursor.drop_steps()
                self.sessions.end_all(SupersededError(f"job {self.name!r} was submitted again"))
                self._ready.clear()
                log.info("resubmitted %s", pairs(job=self.name, step=self.cursor.committed))
                self.start()

    async def rewind(self, step: int) -> None:
        """Go back to `step`: its commit and all later ones are undone. Await it by `to_its_end`.

        Ranks that go back to the same step may all call this: the first call does it. A job that has failed or was cancelled
        stays as it is. Raises UserError where `step` is negative, and ConflictError where it lies ahead of the last commit.
        """
        async with self.cursor.moving:
            self.cursor.check_reached(step)
            if step < self.cursor.committed and not self.cursor.is_broken_off:
                await self._restarted(self._store.rewind(self.name, step), f"reset to step {step}")
        await self.cursor.notify()

    async def set_topology(
        self, topology: TopologySpec, generation: int | None = None, execution: ExecutionSpec | None = None
    ) -> None:
        """Plan the same global batches for another topology, from the first uncommitted step on. All ranks must open anew.

        `generation`: the job's, as the caller knows it. `execution`: how trainers run the plans from now on; None: as before.
        Raises ConflictError where generation or job are over, SpecError where topology, execution and model do not fit.
        """
        async with self.cursor.moving:
            planned = self.planned_spec.planned_for(topology, execution or self.planned_spec.execution)
            check_coefficients(planned)
            if generation not in (None, self.generation):
                raise ConflictError(f"job {self.name!r} is in generation {self.generation}, not {generation}: look again")
            self.cursor.check_goes_on("its topology cannot change any more")
            if planned != self.planned_spec:
                documents = topology.model_dump_json(), planned.execution.model_dump_json(), planned.to_peer_json()
                stored = self._store.set_topology(self.name, *documents, self.generation + 1)
                await self._restarted(stored, "planned anew for another topology")
        await self.cursor.notify()

    async def set_weights(self, step: int, weights: Mapping[str, float]) -> None:
        """Mix the sources by other weights from `step` on. The change is recorded, so a job that is reset or resumed repeats it.

        Raises UserError for invalid weights, ConflictError where the step is planned already or the job is over.
        """
        async with self.cursor.moving:
            self.cursor.check_goes_on("its mixture cannot change any more")
            if step < (begun := self.cursor.next_step):
                raise ConflictError(f"steps before {begun} of job {self.name!r} are planned already; name a later one")
            changes = self.batches.changed(step, weights)
            await self._store.set_mixture(self.name, changes)
            log.info("mixture changed %s", pairs(job=self.name, from_step=step, weights=json.dumps(dict(weights))))
            self.batches.changes = changes
            if self.manifest.vocabulary is not None:
                self.batches.set_up_order()
                self._changed.set()

    async def pause(self, paused: bool) -> None:
        """Pause or resume planning; steps that are planned can still be consumed. Raises ConflictError where the job is over."""
        self.cursor.check_goes_on("it cannot be paused or resumed")
        await self._store.set_paused(self.name, paused)
        self.paused = paused
        self._changed.set()
        log.info("%s %s", "paused" if paused else "resumed", pairs(job=self.name, step=self.cursor.committed))

    async def _restarted(self, change: Awaitable[object], what: str) -> None:
        """Stop the job, await `change` in the store, and go on from there, or as before if it is refused. Hold `moving`."""
        await self.stop()
        try:
            await change
            record = await self._store.load_job(self.name)
            self._fleet.close_job(self.name, fleet_messages.job_closed(self.name))
            self.cursor.drop_steps()
            log.info("changed %s", pairs(job=self.name, what=what, step=record.cursor, generation=record.generation))
            self.cursor.set_to(record)
            self.planned_spec = planned_spec(record)
            self.sessions.end_all(self._stale(f"was {what}"))
        finally:
            self.start()

    async def write_again(self) -> None:
        """Write again what the store has lost of the job, or go on from what it has where that is more than is remembered."""
        async with self.cursor.moving:
            if await write_again(self, self._store) is Loss.BEYOND_MEMORY:
                await self._set_back()

    async def _set_back(self) -> None:
        """Go on from what the store has, since the ranks are ahead of it."""
        await self._restarted(asyncio.sleep(0), f"set back from step {self.cursor.committed} by its store")

    def _stale(self, why: str = "has gone on") -> SupersededError:
        return SupersededError(f"job {self.name!r} {why}: it is in generation {self.generation} now; connect again")

    async def _run(self) -> None:
        failure = ""
        while not self.cursor.is_over:
            ending = bool(failure)
            try:
                await (self._end("FAILED", failure) if ending else self._work())
            except* UnavailableError as group:
                log.warning("waiting for the store %s", pairs(job=self.name, error=first_error(group)))
                await asyncio.sleep(STORE_RETRY_S)
            except* HeadraceError as group:
                failure = failure or str(first_error(group))
                await asyncio.sleep(STORE_RETRY_S * ending)  # the end is not saved either, as where the store has lost the job
            except* Exception:
                log.exception("job failed on an internal error %s", pairs(job=self.name))
                failure = failure or "internal error; see the reorder service's log"
                await asyncio.sleep(STORE_RETRY_S * ending)

    async def _work(self) -> None:
        """Work on the job from wherever it stands to its end. May be called again after an error."""
        if self.manifest.vocabulary is None:
            await self.manifest.list_shards(self._orders.ask_once)  # without retries, so that a wrong path is reported at once
        self.batches.set_up_order()
        await self._feed()

    async def _end(self, state: str, message: str = "") -> None:
        await self._store.set_state(self.name, state, message)
        self.cursor.end(state, message)
        log.info("job ended %s", pairs(job=self.name, state=state, steps=self.cursor.committed, message=message))
        self._fleet.close_job(self.name, fleet_messages.job_closed(self.name))
        for session in self.sessions.by_rank.values():
            session.tell_end(message)
        self._ready.set()
        await self.cursor.notify()

    # -- the window ---------------------------------------------------------------------------------------------------

    async def _feed(self) -> None:
        """Keep the window full of planned steps, until every step is committed."""
        self.cursor.next_step = self.cursor.committed
        indexing = Indexing(self.manifest, self.batches, self._orders.ask, self._changed.set)
        async with asyncio.TaskGroup() as group:
            while not self.cursor.is_at_end:
                if self._order_error:
                    raise JobFailedError(self._order_error)
                if not self._ready.is_set() and not self.batches.to_count(self.cursor.committed):
                    await self._begin()
                while self._may_plan():
                    group.create_task(self._prepare(self.cursor.next_step))
                    self.cursor.next_step += 1
                indexing.go_on(group, max(self.cursor.next_step, self.cursor.awaited_step), ahead=bool(self.cursor.planned))
                self._changed.clear()
                await self._changed.wait()
            indexing.stop()
        if not self.cursor.progress.samples:
            raise JobFailedError(f"every sample of job {self.name!r} was refused: mend them (`headrace inspect`), delete the job")
        await self._end("DONE")

    async def _begin(self) -> None:
        self.cursor.state = "RUNNING"
        await self._store.set_state(self.name, self.cursor.state)
        shards, indexed = len(self.manifest.shards), self.manifest.num_counted
        log.info("began %s", pairs(job=self.name, shards=shards, indexed=indexed, steps=self.cursor.num_steps))
        self._ready.set()

    @property
    def window_bytes(self) -> int:
        """How many bytes of decoded steps may be planned ahead; 0: no limit, see `bytes_ahead`."""
        return bytes_ahead(self.spec.window_bytes, self._fleet.stores_bytes)

    @property
    def warning(self) -> str:
        """One sentence on how the job could be planned better; empty if nothing is known that would help."""
        return self._planner.warning

    def _may_plan(self) -> bool:
        """Return whether to plan the next step: the job has it and is not paused, its samples are known, the window has room."""
        room = has_room(self.cursor.sizes, window=self.spec.window, window_bytes=self.window_bytes)
        return room and not self.paused and self.batches.knows(self.cursor.next_step)

    async def _prepare(self, index: int) -> None:
        """Probe, plan and hand out one global batch, as far as that was not done before an error of the store."""
        step = self.cursor.steps.get(index)
        if step is None or step.plan is None:
            step = self.cursor.steps[index] = await self._planner.step(index, self.batches, self.generation)
            await self._planner.plan(step, self.planned_spec, self.generation, tuple(self.cursor.recent))
        elif all(part.work is not None for part in step.parts.values()):
            return
        self._changed.set()  # the size of the step is known now: the window may have room
        self.sessions.tell_step(step)
        await self._plan_for_formation(step)
        await self._planner.hand_out(
            step,
            len(self._fleet.members),
            on_placed=self.sessions.tell_location,
            on_failed=self._order_failed,
            urgent=lambda: step.index == self.cursor.committed,
            wanted=lambda: self.cursor.steps.get(step.index) is step and not self.cursor.is_over,
        )
        await self.cursor.notify()

    async def follow(self, formations: Sequence[Formation]) -> None:
        """Plan the uncommitted steps for the pipelines of nodes (`formation_of`). Samples and parts stay as they are."""
        self.formations = formations
        for step in self.cursor.planned:
            await self._plan_for_formation(step)

    async def leave_formations(self) -> None:
        """Plan the uncommitted steps for the replicas of the topology again, where the job was trained by nodes before.

        Await it by `to_its_end`.
        """
        async with self.cursor.moving:
            if self.formations:
                self.formations = ()
                await self._restarted(asyncio.sleep(0), "planned for ranks, as no node is connected any more")

    async def _plan_for_formation(self, step: PlannedStep) -> None:
        async with self._planning_again:
            while (formation := formation_of(self.formations, step.index)) != step.formation:
                if self.cursor.steps.get(step.index) is not step:  # it was committed meanwhile
                    return
                try:
                    await self._planner.plan_again(step, self.planned_spec, self.generation, formation)
                except JobFailedError as err:
                    self._order_failed(str(err))
                    return
                self.sessions.tell_step(step)

    def _order_failed(self, error: str) -> None:
        self._order_error = error
        self._changed.set()

    # -- trainers -----------------------------------------------------------------------------------------------------

    def open_session(
        self,
        rank: int,
        num_ranks: int,
        generation: int | None = None,
        replicas: Collection[int] = (),
        *,
        unit: str = LLM,
        together: bool = False,
    ) -> Session:
        """Open a session for a rank, which is first told what is planned already.

        `replicas`: those of `unit` that the rank names (`named` of `Sessions.open`). `generation`: that of a former session that
        this one continues; None: a new process. `together`: as for `Sessions.open`.

        Raises as `Sessions.open`, and SupersededError where `generation` is over.
        """
        if generation not in (None, self.generation):
            raise self._stale()
        former = self.sessions.num_ranks
        topology = self.planned_spec.topology
        most = topology.replicas
        if together:  # their pipelines, each of which takes a microbatch or more, may be more than the topology's replicas
            most = max(most, min(most * topology.microbatches, MAX_NODES))
        session = self.sessions.open(rank, num_ranks, most, replicas, unit=unit, together=together)
        session.next_step = self.cursor.committed
        if self.sessions.num_ranks != former:  # the earlier commits of a rank were for other samples
            self.cursor.forget_commits()
        elif generation is None and not together:  # the model of a new process may lack what the former one had applied
            self.cursor.forget_commits(rank)
        session.tell_planned(self.cursor.planned)
        if self.cursor.is_over:
            session.tell_end(self.cursor.message)
        return session

    def report_lost(self, ticket: str, lease: str) -> None:
        """Have a part decoded again, since a rank could not fetch it from where `lease` put it. Ignored for a former lease."""
        part = self.cursor.find_part(ticket)
        if part is not None and part.lease == lease:
            log.info("part lost %s", pairs(job=self.name, part=part.name, endpoint=part.endpoint))
            part.agreed.is_missed = True
            self._fleet.lost(lease)

    async def commit(self, session: Session, index: int, commit: RankCommit) -> bool:
        """Note that one rank has applied step `index`; return whether all have and the step is in the ledger.

        Repeating a commit is harmless. Waits and raises as `Cursor.note`.
        """
        if await self.cursor.note(session, index, commit) and self.cursor.may_advance(self.sessions.num_ranks):
            await to_its_end(self._commit_ready())
        return index < self.cursor.committed

    async def _commit_ready(self) -> None:
        """Commit, in order, the steps that every rank has committed. Must not be cancelled between updating store and memory."""
        cursor = self.cursor
        async with cursor.moving:
            while cursor.may_advance(self.sessions.num_ranks):
                try:
                    self._clear_away(await cursor.advance(self.manifest.source_of))
                except ConflictError:
                    if await write_again(self, self._store) is not Loss.WRITTEN_AGAIN:
                        await self._set_back()
                await cursor.notify()

    def _clear_away(self, step: PlannedStep) -> None:
        """Release what preprocessors hold of a committed step, and make room in the window. Too many bad samples fail the job."""
        if sentence := self.cursor.progress.judged(self.spec.sources):
            self._order_failed(sentence)
        self._fleet.broadcast(self.name, fleet_messages.step_committed(self.name, step.index))
        self._fleet.release(step.take_works())
        self._changed.set()
