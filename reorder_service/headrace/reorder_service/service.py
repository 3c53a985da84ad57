"""The reorder service: its jobs, its fleet and its store. The gRPC shell is headrace.reorder_service.server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time

from headrace.errors import ConflictError, HeadraceError, LimitError, NotFoundError, SupersededError, UnavailableError
from headrace.observability.logs import pairs
from headrace.reorder_service.fleet.fleet import LOOK_S, Fleet
from headrace.reorder_service.jobs.fleet_messages import job_closed
from headrace.reorder_service.jobs.job import JobRun
from headrace.reorder_service.jobs.job_execution import check_coefficients, check_memory
from headrace.reorder_service.jobs.sessions import Session
from headrace.reorder_service.jobs.stopping import stop_task
from headrace.reorder_service.keep_finished import KeepFinished
from headrace.reorder_service.loop_turns import LoopTurns
from headrace.reorder_service.nodes.clock import Clock
from headrace.reorder_service.nodes.nodes import Nodes
from headrace.reorder_service.store.fatal_jobs import SETTLED_S
from headrace.reorder_service.store.finished_jobs import unfinished
from headrace.reorder_service.store.state import StateStore
from headrace.reorder_service.store.store_retry import retry_while_unavailable
from headrace.reorder_service.tidying import Tidying
from headrace.spec import load_spec_json
from headrace.validation_spec import is_evaluation_of

LOOK_SHARE = 0.02  # the largest share of the time that may go into watching the preprocessors
KEPT_FINISHED = 16  # finished jobs that stay in memory; all others are loaded when somebody asks for them
UNUSED_S = 30.0  # after which nobody holds a finished job of which nobody has asked: longer than any call
_REMEMBERED = 1_000  # names of deleted jobs
_NAMED = 20  # jobs named to somebody who asks for one that there is not

FLEET_SETTLE_S = 5.0  # from the first preprocessor to the last of those that come back to a new leader (headrace.herd)

FOR_RANKS, FOR_PREPROCESSORS = 0, 1

LOST = "if the store has lost it, submit it again: its trainers then go on from their checkpoints"

log = logging.getLogger(__name__)


class ReorderService:
    """The service that a leading process runs: it holds and runs the jobs that have not ended, and loads others on demand."""

    def __init__(
        self,
        store: StateStore,
        keep: KeepFinished | None = None,
        memory_bytes: float = math.inf,
        max_jobs: float = math.inf,
    ) -> None:
        """`keep`: which finished jobs are kept; None: all of them. `memory_bytes`: how much memory this process may use.
        `max_jobs`: how many that have not ended it takes."""
        self._memory_bytes = memory_bytes
        self._max_jobs = max_jobs
        self.store = store
        self._clock = Clock()
        self.fleet = Fleet(self._clock.now_s, FLEET_SETTLE_S)
        self.jobs: dict[str, JobRun] = {}
        """The jobs in memory: all that have not ended, and finished ones that were asked for lately."""
        self.nodes: dict[str, Nodes] = {}
        """The trainer nodes of each job, by job name; none connect unless the job is trained by recoverable pipelines."""
        self.set_aside: dict[str, str] = {}
        """Job -> a sentence why its record cannot be read. Such a job stays as it is, and all others go on."""
        self._deleted: dict[str, None] = {}
        """The jobs that were deleted last, in this order: whoever still asks for one is told so."""
        self.turns = LoopTurns()
        """Turns of the event loop for what is done for one of very many peers: `FOR_RANKS` before `FOR_PREPROCESSORS`."""
        self.num_relays = 0
        """Number of hosts whose ranks share a stream."""
        self.began_s = time.monotonic()
        self.has_stopped = False
        """Whether this process leads no more, or is about to: sessions that are opened from now on are another service's."""
        self._submitting = asyncio.Lock()
        self._used_s: dict[str, float] = {}
        """Finished job in memory -> time on the monotonic clock when it was last asked for."""
        self.tidying = Tidying(
            store, self.jobs, keep=keep or KeepFinished(), read=self._read, delete=self.delete, forget=self.forget_unused
        )
        self._tidying_up: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._settling: asyncio.Task[None] | None = None
        self._rewriting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load and run the jobs that are in the store, as soon as it answers.

        Raises UnavailableError where the store is an embedded one whose server has ended.
        """
        check = self.store.database.check
        self._watching = asyncio.create_task(self._watch_preprocessors())
        await self.store.fatal_jobs.begin_term()
        self._settling = asyncio.create_task(self._settle())
        for name in await retry_while_unavailable(self.store.finished.others, check):
            await retry_while_unavailable(lambda name=name: self._take_up_or_set_aside(name), check, job=name)  # type: ignore[misc]
        for run in self.jobs.values():  # now that all are there: what they do would hold up the loading of others
            run.start()
        for nodes in self.nodes.values():
            nodes.start()
        self._rewriting = asyncio.create_task(self._write_again_when_put_back())
        self._tidying_up = asyncio.create_task(self.tidying.run())

    async def stop(self) -> None:
        """Stop all jobs and disconnect everybody. The next leader, here or elsewhere, continues the jobs from the store."""
        self.has_stopped = True
        if self._watching is not None:
            self._watching.cancel()
        await stop_task(self._settling)
        await stop_task(self._rewriting)
        await stop_task(self._tidying_up)
        for nodes in self.nodes.values():
            await nodes.stop()
        for run in self.jobs.values():
            run.sessions.end_all(UnavailableError("this reorder service has stopped"))
            await run.stop()
        with contextlib.suppress(UnavailableError):  # raised also where another process leads
            await self.store.fatal_jobs.reset_counts()
        self.fleet.dismiss_all()

    async def submit(self, spec_json: str, *, peer: str = "") -> JobRun:
        """Start a job. Submitting the same spec again returns the same job, and resumes it if it had failed.

        `peer`: who does, for the log; empty: this process itself.

        Raises SpecError where the spec is invalid, its planning needs too much memory, or its coefficients are of another model,
        ConflictError where the name belongs to a job with another spec or to one whose record cannot be read, and LimitError
        where as many jobs as are taken have not ended.
        """
        spec = load_spec_json(spec_json)
        (known,) = await self.store.finished.read([spec.name])
        if not known.state:
            spec.check_longest()
            check_memory(spec, self._memory_bytes)
        check_coefficients(spec)
        async with self._submitting:
            self._check_room_for(spec.name, known.state)
            if await self.store.create_job(spec.name, spec.to_json(), spec.to_peer_json()):
                self.set_aside.pop(spec.name, None)
                self._deleted.pop(spec.name, None)
                await self._drop_lost(spec.name)
                of = {"job": spec.name, "strategy": spec.strategy, "global_batch": spec.global_batch, "peer": peer or None}
                log.info("submitted %s", pairs(**of))
            elif spec.name in self.set_aside:
                raise ConflictError(self.set_aside[spec.name])
            # An interrupted submission may have left the job in the store only.
            run = self.jobs.get(spec.name) or await self._take_up_and_start(spec.name)
        if not run.spec.is_same_job(spec):
            fields = ", ".join(name for name in type(spec).model_fields if getattr(run.spec, name) != getattr(spec, name))
            raise ConflictError(
                f"job {spec.name!r} exists with another spec ({fields} differ): choose another name, or "
                f"`headrace job delete {spec.name}` once it is over"
            )
        await run.resubmit()
        return run

    def _check_room_for(self, job: str, state: str) -> None:
        """Raise LimitError where a submission would begin a job, or resume one that has failed, beyond those that are taken.

        `state`: of the job's record in the store; empty: it has none.
        """
        running = self.running_jobs()
        if state in ("", "FAILED") and job not in running and len(running) >= self._max_jobs:
            raise LimitError(
                f"{len(running)} job{'s have' if len(running) > 1 else ' has'} not ended, which is as many as this service "
                "takes: cancel one with `headrace job cancel NAME`, wait for one, or raise the service's --max-jobs"
            )

    def running_jobs(self) -> list[str]:
        """Return the names of the jobs that have not ended."""
        return [run.name for run in self.jobs.values() if not run.cursor.is_over]

    def find(self, job: str) -> JobRun:
        """Return a job in memory by its name.

        Raises NotFoundError where there is none, ConflictError where its record cannot be read.
        """
        try:
            return self.jobs[job]
        except KeyError:
            if job in self.set_aside:
                raise ConflictError(self.set_aside[job]) from None
            if job in self._deleted:
                raise NotFoundError(f"no job {job!r} here: it was deleted") from None
            names = sorted(self.running_jobs())
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            known = (", ".join(names[:_NAMED]) or "none") + more
            raise NotFoundError(
                f"no job {job!r} here; there are: {known}; `headrace job list` names finished ones, too; {LOST}"
            ) from None

    async def load(self, job: str) -> JobRun:
        """Return a job by its name, from the store where it is over and not in memory. Raises as `find`."""
        run = self.jobs.get(job)
        if run is None and job not in self.set_aside:
            async with self._submitting:
                with contextlib.suppress(NotFoundError):
                    run = self.jobs.get(job) or await self._take_up_and_start(job)
        run = run or self.find(job)
        if run.cursor.is_over:
            self._used_s[job] = time.monotonic()
        return run

    async def forget_unused(self) -> None:
        """Drop finished jobs from memory, all but the KEPT_FINISHED that were asked for last, and those that somebody uses."""
        now_s = time.monotonic()
        finished = [name for name, run in self.jobs.items() if run.cursor.is_over]
        self._used_s = {name: self._used_s.get(name, now_s) for name in finished}
        finished.sort(key=self._used_s.__getitem__)
        for name in finished[:-KEPT_FINISHED]:
            run = self.jobs[name]
            held = run.cursor.moving.locked() or self.nodes[name].connected or run.sessions.has_live
            if now_s - self._used_s[name] > UNUSED_S and not held:
                await self._forget(name)

    async def _forget(self, job: str) -> None:
        del self.jobs[job]
        await self.nodes.pop(job).stop()

    async def delete(self, job: str) -> None:
        """Delete a job that is over or set aside, with all that the store has of it. Its name is free then.

        Raises NotFoundError where there is none, ConflictError where it is not over.
        """
        async with self._submitting:
            run = self.jobs.get(job)
            async with run.cursor.moving if run is not None else contextlib.nullcontext():
                if run is not None and not run.cursor.is_over:
                    raise ConflictError(unfinished(job, run.cursor.state))
                await self.store.finished.delete(job, even_unfinished=job in self.set_aside)
                self.set_aside.pop(job, None)
                self._deleted[job] = None
                if len(self._deleted) > _REMEMBERED:
                    del self._deleted[next(iter(self._deleted))]
                if run is not None:
                    run.sessions.end_all(NotFoundError(f"job {job!r} was deleted"))
                    await self._forget(job)
        log.info("deleted %s", pairs(job=job))

    async def cancel_with_evaluations(self, job: str) -> JobRun:
        """Cancel a job, and the evaluations of its validation sets that run. Raises as `load`."""
        run = await self.load(job)
        for other in [run, *(one for one in self.jobs.values() if is_evaluation_of(one.name, run.spec))]:
            await other.cancel()
        return run

    async def delete_with_evaluations(self, job: str) -> None:
        """Delete a job that is over or set aside, and the evaluations of its validation sets. Raises as `delete`."""
        spec = None if job in self.set_aside else (await self.load(job)).spec
        await self.delete(job)
        if spec is not None and spec.validation:
            for name in [name for name in await self.store.jobs() if is_evaluation_of(name, spec)]:
                with contextlib.suppress(NotFoundError):
                    await (await self.load(name)).cancel()
                    await self.delete(name)

    async def find_nodes(self, job: str) -> Nodes:
        """Return the trainer nodes of a job. Raises as `load`."""
        return self.nodes[(await self.load(job)).name]

    def find_session(self, session_id: str) -> tuple[JobRun, Session]:
        """Return a session by its id, with its job.

        Raises NotFoundError where it does not exist, also with its job, ConflictError as `find`, and SupersededError where a
        newer session of the rank has replaced it.
        """
        job, _, rest = session_id.partition("/")
        run = self.find(job)
        rank = rest.partition("/")[0]
        session = run.sessions.by_rank.get(int(rank)) if rank.isdigit() else None
        if session is None:
            raise NotFoundError(f"no session {session_id!r}; open one")
        if session.id != session_id:
            raise SupersededError(f"rank {rank} of job {job!r} was opened again by another process")
        return run, session

    async def _watch_preprocessors(self) -> None:
        """Look for silent and late preprocessors again and again, for at most LOOK_SHARE of the time."""
        took_s, failure = 0.0, ""
        while True:
            await self._clock.sleep(max(LOOK_S, took_s / LOOK_SHARE))
            began_s = time.perf_counter()
            try:
                self.fleet.look()
                failure = ""
            except Exception as err:  # without this watch a preprocessor that hangs would keep its work for ever
                if failure != repr(err):  # it may recur ten times a second
                    log.exception("looking after the preprocessors failed %s", pairs(preprocessors=",".join(self.fleet.members)))
                failure = repr(err)
            took_s = time.perf_counter() - began_s

    async def _settle(self) -> None:
        await asyncio.sleep(SETTLED_S)
        await retry_while_unavailable(self.store.fatal_jobs.reset_counts, self.store.database.check)

    async def _write_again_when_put_back(self) -> None:
        """Write again what the store has lost of each job, whenever it was put back to an earlier moment."""
        database = self.store.database
        while True:
            await database.put_back.wait()
            database.put_back.clear()
            for run in list(self.jobs.values()):
                try:
                    await retry_while_unavailable(run.write_again, database.check, job=run.name)
                except NotFoundError:
                    await self._drop_lost(run.name)
                except UnavailableError:  # an embedded store that will never answer: this process lets go
                    raise
                except Exception:  # such as a record that cannot be read; the other jobs, and later losses, still count
                    log.exception("what the store has lost is not written again %s", pairs(job=run.name))

    async def _drop_lost(self, job: str) -> None:
        """Drop a job that the store has lost as a whole, if this process holds it, and tell its ranks."""
        if (run := self.jobs.pop(job, None)) is not None:
            await self.nodes.pop(job).stop()
            await run.stop()
            self.fleet.close_job(job, job_closed(job))
            log.error("the store has lost a job %s", pairs(job=job, steps=run.cursor.committed, remedy="submit it again"))
            run.sessions.end_all(NotFoundError(f"no job {job!r} here: {LOST}"))

    async def _take_up_or_set_aside(self, job: str) -> None:
        """Load a job, or set it aside where its record cannot be read, so that it keeps no other job from running."""
        try:
            await self._take_up(job)
        except UnavailableError:
            raise
        except Exception as err:
            why = str(err) if isinstance(err, HeadraceError) else f"{type(err).__name__}: {err}"
            self.set_aside[job] = (
                f"job {job!r} is set aside, since its record in the store cannot be read ({why}): mend it and start the reorder "
                "service again, or submit the job by another name"
            )
            log.error("job set aside %s", pairs(job=job, error=why))

    async def _take_up_and_start(self, job: str) -> JobRun:
        """Load a job, and run it unless it is over."""
        run = await self._take_up(job)
        run.start()
        return run

    async def _take_up(self, job: str) -> JobRun:
        run = await self._read(job)
        nodes = Nodes(run, self.store)
        await nodes.restore()
        self.jobs[job], self.nodes[job] = run, nodes
        return run

    async def _read(self, job: str) -> JobRun:
        run = JobRun(await self.store.load_job(job), self.store, self.fleet)
        await run.manifest.load()
        return run
