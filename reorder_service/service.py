"""The reorder service: its jobs, its fleet and its store. The gRPC shell is reorder_service.server."""

from __future__ import annotations

import asyncio
import logging
import time

from headrace.errors import ConflictError, NotFoundError, SpecError, SupersededError, UnavailableError
from headrace.spec import load_spec_json
from headrace.telemetry import pairs
from reorder_service.clock import Clock
from reorder_service.fleet import LOOK_S, Fleet
from reorder_service.job import FINAL, JobRun
from reorder_service.nodes import Nodes
from reorder_service.sessions import Session
from reorder_service.state import StateStore

LOOK_SHARE = 0.02  # of the time, at most, for looking after the preprocessors

log = logging.getLogger(__name__)


class ReorderService:
    """Holds every job of the store; runs those that have not ended."""

    def __init__(self, store: StateStore) -> None:
        self.store = store
        self._clock = Clock()
        self.fleet = Fleet(self._clock.now_s)
        self.jobs: dict[str, JobRun] = {}
        self.nodes: dict[str, Nodes] = {}
        """Of each job."""
        self.began_s = time.monotonic()
        self._submitting = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take up what an earlier process left."""
        self._looking = asyncio.create_task(self._look())
        for name in await self.store.jobs():
            try:
                await self._take_up(name)
            except SpecError as err:  # written by another version: the other jobs go on
                log.error("job left alone %s", pairs(job=name, error=err))
        for nodes in self.nodes.values():
            nodes.start()

    async def stop(self) -> None:
        """Stop working; everything goes on from the store, here or elsewhere."""
        if self._looking is not None:
            self._looking.cancel()
        for nodes in self.nodes.values():
            await nodes.stop()
        for run in self.jobs.values():
            run.sessions.end_all(UnavailableError("this reorder service has stopped"))
            await run.stop()
        self.fleet.dismiss_all()

    async def submit(self, spec_json: str) -> JobRun:
        """Start a job. The same spec again gives the same job, and goes on with it if it had failed.

        Raises SpecError or ConflictError.
        """
        spec = load_spec_json(spec_json)
        canonical = spec.to_json()
        async with self._submitting:
            if await self.store.create_job(spec.name, canonical):
                log.info("submitted %s", pairs(job=spec.name, strategy=spec.strategy, global_batch=spec.global_batch))
            # A submission that was cut off has left the job in the store alone.
            run = self.jobs.get(spec.name) or await self._take_up(spec.name)
        if run.spec != spec:
            raise ConflictError(f"job {spec.name!r} exists with another spec; choose another name")
        await run.resubmit()
        return run

    def running_jobs(self) -> list[str]:
        """Names of the jobs that have not ended."""
        return [run.name for run in self.jobs.values() if run.state not in FINAL]

    def find(self, job: str) -> JobRun:
        """Raises NotFoundError."""
        try:
            return self.jobs[job]
        except KeyError:
            known = ", ".join(sorted(self.jobs)) or "none"
            raise NotFoundError(f"no job {job!r} here; there are: {known}") from None

    def find_nodes(self, job: str) -> Nodes:
        """Those of a job. Raises NotFoundError."""
        return self.nodes[self.find(job).name]

    def find_session(self, session_id: str) -> tuple[JobRun, Session]:
        """Raises NotFoundError, or SupersededError where a newer session of the rank took over."""
        job, _, rest = session_id.partition("/")
        run = self.find(job)
        rank = rest.partition("/")[0]
        session = run.sessions.by_rank.get(int(rank)) if rank.isdigit() else None
        if session is None:
            raise NotFoundError(f"no session {session_id!r}; open one")
        if session.id != session_id:
            raise SupersededError(f"rank {rank} of job {job!r} was opened again by another process")
        return run, session

    async def _look(self) -> None:
        """Keep an eye on the preprocessors."""
        took_s = 0.0
        while True:
            await self._clock.sleep(max(LOOK_S, took_s / LOOK_SHARE))
            began_s = time.perf_counter()
            self.fleet.look()
            took_s = time.perf_counter() - began_s

    async def _take_up(self, job: str) -> JobRun:
        run = JobRun(await self.store.load_job(job), self.store, self.fleet)
        await run.manifest.load()
        nodes = Nodes(run, self.store)
        await nodes.restore()
        self.jobs[job], self.nodes[job] = run, nodes
        run.start()
        return run
