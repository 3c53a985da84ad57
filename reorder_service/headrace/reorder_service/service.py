"""The reorder service: its jobs, its fleet and its store. The gRPC shell is headrace.reorder_service.server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from headrace.errors import ConflictError, HeadraceError, NotFoundError, SupersededError, UnavailableError
from headrace.observability.logs import pairs
from headrace.reorder_service.fleet.fleet import LOOK_S, Fleet
from headrace.reorder_service.jobs.fleet_messages import job_closed
from headrace.reorder_service.jobs.job import JobRun
from headrace.reorder_service.jobs.job_execution import check_coefficients
from headrace.reorder_service.jobs.sessions import Session
from headrace.reorder_service.jobs.stopping import stop_task
from headrace.reorder_service.nodes.clock import Clock
from headrace.reorder_service.nodes.nodes import Nodes
from headrace.reorder_service.store.fatal_jobs import SETTLED_S
from headrace.reorder_service.store.state import StateStore
from headrace.reorder_service.store.store_retry import retry_while_unavailable
from headrace.spec import load_spec_json

LOOK_SHARE = 0.02  # the largest share of the time that may go into watching the preprocessors

LOST = "if the store has lost it, submit it again: its trainers then go on from their checkpoints"

log = logging.getLogger(__name__)


class ReorderService:
    """The service that a leading process runs: it holds every job of the store, and runs those that have not ended."""

    def __init__(self, store: StateStore) -> None:
        self.store = store
        self._clock = Clock()
        self.fleet = Fleet(self._clock.now_s)
        self.jobs: dict[str, JobRun] = {}
        self.nodes: dict[str, Nodes] = {}
        """The trainer nodes of each job, by job name; none connect unless the job is trained by recoverable pipelines."""
        self.set_aside: dict[str, str] = {}
        """Job -> a sentence why its record cannot be read. Such a job stays as it is, and all others go on."""
        self.began_s = time.monotonic()
        self._submitting = asyncio.Lock()
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
        for name in await retry_while_unavailable(self.store.jobs, check):
            await retry_while_unavailable(lambda name=name: self._take_up_or_set_aside(name), check, job=name)  # type: ignore[misc]
        for nodes in self.nodes.values():
            nodes.start()
        self._rewriting = asyncio.create_task(self._write_again_when_put_back())

    async def stop(self) -> None:
        """Stop all jobs and disconnect everybody. The next leader, here or elsewhere, continues the jobs from the store."""
        if self._watching is not None:
            self._watching.cancel()
        await stop_task(self._settling)
        await stop_task(self._rewriting)
        for nodes in self.nodes.values():
            await nodes.stop()
        for run in self.jobs.values():
            run.sessions.end_all(UnavailableError("this reorder service has stopped"))
            await run.stop()
        with contextlib.suppress(UnavailableError):  # raised also where another process leads
            await self.store.fatal_jobs.reset_counts()
        self.fleet.dismiss_all()

    async def submit(self, spec_json: str) -> JobRun:
        """Start a job. Submitting the same spec again returns the same job, and resumes it if it had failed.

        Raises SpecError where the spec is invalid or its coefficients are of another model, and ConflictError where the name
        belongs to a job with another spec or to one whose record cannot be read.
        """
        spec = load_spec_json(spec_json)
        if spec.name not in self.jobs:
            spec.check_longest()
        check_coefficients(spec)
        canonical = spec.to_json()
        async with self._submitting:
            if await self.store.create_job(spec.name, canonical):
                self.set_aside.pop(spec.name, None)
                await self._drop_lost(spec.name)
                log.info("submitted %s", pairs(job=spec.name, strategy=spec.strategy, global_batch=spec.global_batch))
            elif spec.name in self.set_aside:
                raise ConflictError(self.set_aside[spec.name])
            # An interrupted submission may have left the job in the store only.
            run = self.jobs.get(spec.name) or await self._take_up(spec.name)
        if not run.spec.is_same_job(spec):
            raise ConflictError(f"job {spec.name!r} exists with another spec; choose another name")
        await run.resubmit()
        return run

    def running_jobs(self) -> list[str]:
        """Return the names of the jobs that have not ended."""
        return [run.name for run in self.jobs.values() if not run.cursor.is_over]

    def find(self, job: str) -> JobRun:
        """Return a job by its name. Raises NotFoundError where there is none, ConflictError where its record cannot be read."""
        try:
            return self.jobs[job]
        except KeyError:
            if job in self.set_aside:
                raise ConflictError(self.set_aside[job]) from None
            known = ", ".join(sorted(self.jobs)) or "none"
            raise NotFoundError(f"no job {job!r} here; there are: {known}; {LOST}") from None

    def find_nodes(self, job: str) -> Nodes:
        """Return the trainer nodes of a job. Raises NotFoundError where there is no job, ConflictError where it is set aside."""
        return self.nodes[self.find(job).name]

    def find_session(self, session_id: str) -> tuple[JobRun, Session]:
        """Return a session by its id, with its job.

        Raises NotFoundError where it does not exist, ConflictError as `find`, and SupersededError where a newer session of the
        rank has replaced it.
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

    async def _drop_lost(self, job: str) -> None:
        """Drop a job that the store has lost as a whole, if this process holds it, and tell its ranks."""
        if (run := self.jobs.pop(job, None)) is not None:
            await self.nodes.pop(job).stop()
            await run.stop()
            self.fleet.close_job(job, job_closed(job))
            log.error("the store has lost a job %s", pairs(job=job, steps=run.cursor.committed, remedy="submit it again"))
            run.sessions.end_all(NotFoundError(f"no job {job!r} here: {LOST}"))

    async def _take_up_or_set_aside(self, job: str) -> None:
        """Load and run a job, or set it aside where its record cannot be read, so that it keeps no other job from running."""
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

    async def _take_up(self, job: str) -> JobRun:
        run = JobRun(await self.store.load_job(job), self.store, self.fleet)
        await run.manifest.load()
        nodes = Nodes(run, self.store)
        await nodes.restore()
        self.jobs[job], self.nodes[job] = run, nodes
        run.start()
        return run
