"""Collects what the page shows: looks at jobs and preprocessors in the event loop, and makes bodies of them in a thread."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from headrace.admission import release
from headrace.errors import UnavailableError, UserError
from headrace.quarantine import Rejected
from headrace.rates import SPAN_S, Look, Looks
from headrace.reorder_service.api.job_statuses import (
    LIST_PAGE,
    job_status,
    listed_names,
    listed_statuses,
    preprocessor_statuses,
    shown_step,
)
from headrace.reorder_service.jobs.step_history import KEPT_STEPS
from headrace.reorder_service.leadership import Leadership
from headrace.reorder_service.page.answers import FRESH_S, JSON, Answer
from headrace.reorder_service.page.job_views import job_view, listed_view, preprocessors_view, quarantine_view
from headrace.reorder_service.page.run_timeline import has_begins
from headrace.reorder_service.page.step_views import steps_view
from headrace.reorder_service.page.timeline_view import ShownStep, timeline_view
from headrace.reorder_service.service import ReorderService
from headrace.v1.jobs_pb2 import JobStatus

LISTED_FINISHED = 20  # jobs that are over in the list, the latest: as many as `headrace top` has
NAMES_S = 5.0  # between two looks for other finished jobs in the store
MOST_LOOKS = 10  # at a job that does not go on: those of the last seconds, and the one since which it has not
STEPS, MOST_REJECTIONS, REJECTIONS = 200, 1_000, 100
READ_REJECTIONS = 10_000  # of a job, from which pages are cut: a larger quarantine is for `headrace job quarantine`
REJECTIONS_PAGE = 100  # read at a time, between which the event loop has other turns
REJECTIONS_S = 5.0  # between two times that a quarantine which grows is read
KEPT_QUARANTINES, KEPT_TIMELINES = 4, 8

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Quarantine:
    uid: str
    total: int
    read_s: float
    rejected: list[Rejected]

    def is_stale(self, uid: str, total: int) -> bool:
        """Whether it is another job's of that name, or has changed since, and was not read just now."""
        return uid != self.uid or (total != self.total and time.monotonic() - self.read_s >= REJECTIONS_S)


class PageData:
    """The figures of the page. Each method raises UnavailableError where this process does not lead, but `service`."""

    def __init__(self, leadership: Leadership, endpoint: str) -> None:
        """`endpoint`: at which the service answers calls."""
        self._leadership = leadership
        self._endpoint = endpoint
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="page")  # planning has threads of its own
        self._looks: dict[str, Looks] = {}
        self._fleet_looks: list[Look] = []
        self._names: list[str] = []
        self._named: tuple[float, frozenset[str]] = (-math.inf, frozenset())
        self._quarantines: OrderedDict[str, _Quarantine] = OrderedDict()
        self._shown: OrderedDict[str, ShownStep] = OrderedDict()

    def close(self) -> None:
        """Begin nothing more in the thread; what is being simulated there ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def service(self) -> Answer:
        """Tell of the service, also where it stands by or is starting."""
        leader = (self._leadership.leader or " ").split(" ")[0] or None
        about: dict[str, Any] = {"version": release(), "endpoint": self._endpoint, "leader": leader}
        try:
            service = self._leadership.service
        except UnavailableError as err:
            return Answer.of_value(about | {"leading": False, "message": str(err), "preprocessors": []})
        self._look_at_fleet(service)
        looks = tuple(self._fleet_looks)
        return await self._in_thread(
            lambda: Answer.of_value(about | {"leading": True, "message": "", "preprocessors": preprocessors_view(looks)})
        )

    async def jobs(self) -> Answer:
        """Tell of all jobs that have not ended, and of the latest finished ones, in the order of their submission."""
        service = self._leadership.service
        names = await self._listed_names(service)
        shown = names[-LIST_PAGE:]
        statuses = await listed_statuses(self._leadership, shown, preprocessor_statuses(service))
        self._looks = {status.job: self._looks.get(status.job, Looks()) for status in statuses}
        looks = [self._look_at(status) for status in statuses]
        left_out = len(names) - len(shown)
        return await self._in_thread(
            lambda: Answer.of_value({"left_out": left_out, "jobs": [listed_view(of_job) for of_job in looks]})
        )

    async def job(self, name: str) -> Answer:
        """Tell of one job. Raises NotFoundError where there is none, ConflictError where its record cannot be read."""
        service = self._leadership.service
        run = await service.load(name)
        looks = self._look_at(await job_status(self._leadership, run))
        units = {rank: session.unit for rank, session in run.sessions.by_rank.items() if session.replicas is not None}
        (note,) = await service.store.finished.read([name])
        ended_s = note.ended_s if run.cursor.is_over else None
        return await self._in_thread(lambda: Answer.of_value(job_view(looks, units=units, ended_s=ended_s)))

    async def steps(self, name: str, query: Mapping[str, str]) -> Answer:
        """Tell of the latest committed steps, `last` of them. Raises as `job`, and UserError for another query."""
        last = _number(query, "last", STEPS, 1, KEPT_STEPS)
        steps = (await self._leadership.service.load(name)).cursor.history.latest(last)
        return await self._in_thread(lambda: Answer.of_value(steps_view(steps)))

    async def timeline(self, name: str, query: Mapping[str, str]) -> Answer:
        """Tell what a step's plan has each stage do when, and what it did when: `step`, or the latest one of which both are
        known, or the latest planned one.

        Raises as `job`, NotFoundError where that plan is not at hand, and UserError for another query.
        """
        run = await self._leadership.service.load(name)
        index = _number(query, "step", -1, 0, 1 << 62)
        if index < 0:
            known = (step.index for step in reversed(run.cursor.recent) if step.index < run.cursor.committed and has_begins(step))
            index = next(known, -1)
        step = shown_step(run, index)
        has_run = step.index < run.cursor.committed
        shown = self._shown.get(name)
        if shown is None or not shown.is_of(step, has_run=has_run):
            shown = await self._in_thread(functools.partial(ShownStep.of, step, run.planned_spec, has_run=has_run))
            _keep(self._shown, name, shown, KEPT_TIMELINES)
        body = timeline_view(shown, forecast_s=step.forecast_s, measured_s=step.measured_s if has_run else math.nan).encode()
        return await self._in_thread(Answer.of, body, JSON)

    async def quarantine(self, name: str, query: Mapping[str, str]) -> Answer:
        """Tell of the quarantined samples from the `first` on, `count` of them, in the order of the job's samples.

        Raises as `job`, and UserError for another query.
        """
        first = _number(query, "first", 0, 0, 1 << 62)
        count = _number(query, "count", REJECTIONS, 1, MOST_REJECTIONS)
        service = self._leadership.service
        run = await service.load(name)
        total = await service.store.num_quarantined(name)
        read = self._quarantines.get(name)
        if read is None or read.is_stale(run.cursor.uid, total):
            read = _Quarantine(run.cursor.uid, total, time.monotonic(), await self._read_quarantine(service, name))
            _keep(self._quarantines, name, read, KEPT_QUARANTINES)
        shown = read.rejected[first : first + count]
        return await self._in_thread(lambda: Answer.of_value(quarantine_view(shown, total, run.manifest.shards)))

    async def _in_thread(self, make: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, make, *args)

    def _look_at(self, status: JobStatus) -> tuple[Look, ...]:
        """Add a look at a job, unless the last one is fresh, and return those of late."""
        while len(self._looks) > 2 * LIST_PAGE:  # finished jobs that somebody has looked at one by one
            del self._looks[next(iter(self._looks))]
        looks = self._looks.setdefault(status.job, Looks())
        now_s = time.monotonic()
        if looks.held and now_s - looks.held[-1].at_s < FRESH_S / 2:  # its page and the list of jobs are asked for in turn
            looks.held.pop()
        looks.add(Look(at_s=now_s, status=status))
        if len(looks.held) > MOST_LOOKS:
            del looks.held[1]
        return tuple(looks.held)

    def _look_at_fleet(self, service: ReorderService) -> None:
        now_s, looks = time.monotonic(), self._fleet_looks
        term = service.store.database.term
        if looks and looks[-1].status.term != term:
            looks.clear()
        looks.append(Look(at_s=now_s, status=JobStatus(term=term, preprocessors=preprocessor_statuses(service))))
        while len(looks) > 2 and now_s - looks[1].at_s >= SPAN_S:
            del looks[0]

    async def _listed_names(self, service: ReorderService) -> list[str]:
        """Return the names of the jobs to list; those of finished ones as of NAMES_S ago at most."""
        looked_s, running = self._named
        present = frozenset(service.jobs)
        if present != running or time.monotonic() - looked_s >= NAMES_S:
            self._names = await listed_names(service, LISTED_FINISHED)
            self._named = time.monotonic(), present
        return self._names

    async def _read_quarantine(self, service: ReorderService, name: str) -> list[Rejected]:
        found: dict[str, Rejected] = {}
        async for item in service.store.quarantine(name, REJECTIONS_PAGE):
            found[item.name] = item
            if len(found) >= READ_REJECTIONS:
                break
        for sample, thumbnail in (await service.store.thumbnails(name)).items():
            if sample in found:
                found[sample] = replace(found[sample], thumbnail=thumbnail)
        return sorted(found.values(), key=lambda item: (item.sample_id is None, item.sample_id or 0, item.name))


def _number(query: Mapping[str, str], name: str, otherwise: int, least: int, most: int) -> int:
    """Return a whole number of the query, `otherwise` where it has none of that name. Raises UserError for any other value."""
    if (text := query.get(name)) is None:
        return otherwise
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
        raise UserError(f"?{name}= takes a whole number from {least} to {most}, got {text[:20]!r}")
    return int(text)


def _keep(held: OrderedDict[str, _T], name: str, value: _T, most: int) -> None:
    held.pop(name, None)
    held[name] = value
    while len(held) > most:
        held.popitem(last=False)
