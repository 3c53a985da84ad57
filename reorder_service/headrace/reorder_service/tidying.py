"""Keeps the store small while a process leads: compacts ledgers, notes which jobs are over, and drops finished ones in time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from headrace.errors import HeadraceError, UnavailableError
from headrace.observability.logs import pairs
from headrace.reorder_service.jobs.job import JobRun
from headrace.reorder_service.keep_finished import DAY_S, KeepFinished
from headrace.reorder_service.store.finished_jobs import JobNote, Summary
from headrace.reorder_service.store.ledger_pages import steps_per_page
from headrace.reorder_service.store.state import StateStore

TIDY_S = 1.0
LOOK_THROUGH_S = 600.0  # how often all finished jobs are looked through
_FIRST_LOOK_S = 60.0  # after taking over: the jobs that run come first

log = logging.getLogger(__name__)


class Tidying:
    """Tidies the store up, one thing after the other, beside the jobs that run. Whatever fails is tried again."""

    def __init__(
        self,
        store: StateStore,
        jobs: Mapping[str, JobRun],
        *,
        keep: KeepFinished,
        read: Callable[[str], Awaitable[JobRun]],
        delete: Callable[[str], Awaitable[None]],
        forget: Callable[[], Awaitable[None]],
    ) -> None:
        """`jobs`: those in memory. `read`: returns a job as the store has it. `delete`: deletes a finished job. `forget`: drops
        finished jobs from memory.
        """
        self._store = store
        self._jobs = jobs
        self._keep = keep
        self._read = read
        self._delete = delete
        self._forget = forget
        self._compacted: dict[str, int] = {}
        """Job -> its committed steps when this leader last compacted its ledger, rounded down to whole pages."""
        self._noted: set[str] = set()
        """Jobs in memory that are over, and of which the store knows that."""

    async def run(self) -> None:
        """Tidy up until cancelled."""
        look_s, failure = time.monotonic() + _FIRST_LOOK_S, ""
        while True:
            await asyncio.sleep(TIDY_S)
            try:
                await self.compact_ledgers()
                await self.note_ends(time.time())
                await self._forget()
                if time.monotonic() >= look_s:
                    look_s = time.monotonic() + LOOK_THROUGH_S
                    await self.look_through(time.time())
                failure = ""
            except Exception as err:  # whatever it is, it must not end this for good; the store may only be away
                if failure != repr(err):  # it may recur every second
                    log.warning("the store is not tidied up %s", pairs(error=err), exc_info=not isinstance(err, HeadraceError))
                failure = repr(err)

    async def compact_ledgers(self) -> None:
        """Move what running jobs have committed a while ago into pages."""
        running = [run for run in self._jobs.values() if not run.cursor.is_over]
        self._compacted = {run.name: self._compacted.get(run.name, 0) for run in running}
        for run in running:
            num_steps, committed = steps_per_page(run.spec.global_batch), run.cursor.committed
            if committed - self._compacted[run.name] in range(num_steps):
                continue
            while await self._store.compact_ledger(run.name, num_steps):
                log.debug("compacted %s", pairs(job=run.name, steps=num_steps))
            self._compacted[run.name] = committed // num_steps * num_steps

    async def note_ends(self, now_s: float) -> None:
        """Note in the store which of the jobs in memory are over."""
        over = {run.name: run for run in self._jobs.values() if run.cursor.is_over}
        self._noted &= over.keys()
        for name in over.keys() - self._noted:
            await self._note(over[name], now_s)
            self._noted.add(name)

    async def look_through(self, now_s: float) -> None:
        """Drop finished jobs that are not kept any longer (`KeepFinished`), and note the end of those where nobody has."""
        notes = await self._store.finished.read(await self._store.jobs())
        for note in self._keep.dropped(notes, now_s):
            assert note.ended_s is not None
            await self._delete(note.job)
            ended_days = round((now_s - note.ended_s) / DAY_S, 1)
            log.info("dropped %s", pairs(job=note.job, state=note.state, steps=note.committed_steps, ended_days_ago=ended_days))
        for note in notes:
            if note.is_over and note.summary is None and note.job not in self._jobs:
                await self._note_unloaded(note, now_s)

    async def _note_unloaded(self, note: JobNote, now_s: float) -> None:
        try:
            await self._note(await self._read(note.job), now_s)
        except UnavailableError:
            raise
        except Exception as err:  # its record cannot be read: it is dropped in time all the same
            log.warning("no summary %s", pairs(job=note.job, error=err))
            await self._store.finished.note(note.job, now_s, Summary(committed_steps=note.committed_steps))

    async def _note(self, run: JobRun, now_s: float) -> None:
        summary = Summary(
            committed_steps=run.cursor.committed,
            num_steps=run.cursor.num_steps,
            samples=run.cursor.progress.samples,
            quarantined=await self._store.num_quarantined(run.name),
            num_shards=len(run.manifest.shards),
            indexed_shards=run.manifest.num_counted,
        )
        await self._store.finished.note(run.name, now_s, summary)
