"""What the service tells of its jobs and preprocessors, as the messages that tools and the web page are made from."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence

from headrace.errors import NotFoundError
from headrace.reorder_service.fleet.member import Member
from headrace.reorder_service.jobs.job import JobRun
from headrace.reorder_service.jobs.planned_step import PlannedStep
from headrace.reorder_service.jobs.sessions import Session
from headrace.reorder_service.leadership import Leadership
from headrace.reorder_service.service import ReorderService
from headrace.reorder_service.store.finished_jobs import JobNote, Summary
from headrace.reorder_service.store.progress import Amounts
from headrace.v1 import jobs_pb2

LIST_PAGE = 200  # jobs of a reply: also with a thousand ranks and preprocessors each well below the largest message


async def job_status(
    leadership: Leadership, run: JobRun, preprocessors: Iterable[jobs_pb2.PreprocessorStatus] | None = None
) -> jobs_pb2.JobStatus:
    """Return all that is told of a job in memory.

    `preprocessors`: those of `preprocessor_statuses`, for callers that ask of many jobs; None: they are made anew.

    Raises UnavailableError where this process does not lead.
    """
    service = leadership.service
    nodes = service.nodes[run.name]
    forecast_step_s, measured_step_s = run.cursor.step_times
    return jobs_pb2.JobStatus(
        job=run.name,
        state=jobs_pb2.JobState.Value(f"JOB_STATE_{run.cursor.state}"),
        message=run.cursor.message,
        committed_steps=run.cursor.committed,
        num_steps=run.cursor.num_steps,
        committed_samples=run.cursor.progress.samples,
        quarantined_samples=await service.store.num_quarantined(run.name),
        num_shards=len(run.manifest.shards),
        indexed_shards=run.manifest.num_counted,
        first_loss=run.cursor.progress.first_loss,
        last_loss=run.cursor.progress.last_loss,
        data_wait_s=run.cursor.progress.data_wait_s,
        step_s=run.cursor.progress.step_s,
        forecast_step_s=forecast_step_s,
        measured_step_s=measured_step_s,
        preprocessors=preprocessor_statuses(service) if preprocessors is None else preprocessors,
        spec_json=run.planned_spec.to_json(),
        planned_steps=sum(step.plan is not None for step in run.cursor.steps.values()),
        planned_bytes=sum(step.num_bytes or 0 for step in run.cursor.steps.values()),
        window_bytes=run.window_bytes,
        warning=run.warning,
        paused=run.paused,
        generation=run.generation,
        topology_json=run.planned_spec.topology.model_dump_json(),
        leader=leadership.leader.split()[0],
        term=service.store.database.term,
        ranks=[_rank_status(session) for _, session in sorted(run.sessions.by_rank.items())],
        sources=_source_statuses(run),
        up_s=time.monotonic() - service.began_s,
        mixture_json=json.dumps(run.batches.changes),
        snapshot=nodes.snapshot if nodes.snapshot.generation else None,
        recoveries=nodes.recoveries,
        nodes=[jobs_pb2.NodeStatus(node=name, connected=here, leaving=leaving) for name, here, leaving in nodes.present],
    )


def preprocessor_statuses(service: ReorderService) -> list[jobs_pb2.PreprocessorStatus]:
    """Return what is told of each connected preprocessor."""
    return [_preprocessor_status(member) for member in service.fleet.members.values()]


async def listed_names(service: ReorderService, most_finished: int = 0) -> list[str]:
    """Return the names of the jobs in the order of their submission.

    `most_finished`: how many that are over are named, the latest; 0: all of them.
    """
    names = await service.store.jobs()
    if not most_finished:
        return names
    latest = await _latest_finished(service, names, most_finished)
    return [name for name in names if name in latest or name in service.set_aside or _runs(service, name)]


async def listed_statuses(
    leadership: Leadership, names: Sequence[str], preprocessors: Iterable[jobs_pb2.PreprocessorStatus] | None = None
) -> list[jobs_pb2.JobStatus]:
    """Return what a list says of these jobs, at most LIST_PAGE: all of one in memory, what the store notes of any other.

    `preprocessors`: as for `job_status`. Jobs that are gone by now are left out. Raises as `job_status`.
    """
    notes = await leadership.service.store.finished.read(names)
    return [status for note in notes if (status := await _listed(leadership, note, preprocessors)) is not None]


def shown_step(run: JobRun, index: int = -1) -> PlannedStep:
    """Return a planned step of a job. `index`: its number; -1: the latest one with a full global batch.

    Raises NotFoundError where the step is neither in the window nor among the latest committed ones.
    """
    planned = [*run.cursor.recent, *(step for step in run.cursor.steps.values() if step.plan is not None)]
    if index < 0:
        full = [step for step in planned if len(step.probes) == max(len(s.probes) for s in planned) and step.probes]
        if full:
            return full[-1]
    for step in reversed(planned):  # of two with one index the later one is the job's
        if step.index == index and step.probes:
            return step
    raise NotFoundError(f"no plan of step {index} of job {run.name!r} is at hand: only the window and the latest steps are kept")


async def _latest_finished(service: ReorderService, names: Sequence[str], most: int) -> set[str]:
    """Return the names of the finished jobs that were submitted last, at most so many."""
    latest: list[str] = []
    for stop in range(len(names), 0, -LIST_PAGE):
        notes = await service.store.finished.read(names[max(0, stop - LIST_PAGE) : stop])
        latest += [note.job for note in reversed(notes) if note.is_over]
        if len(latest) >= most:
            break
    return set(latest[:most])


async def _listed(
    leadership: Leadership, note: JobNote, preprocessors: Iterable[jobs_pb2.PreprocessorStatus] | None
) -> jobs_pb2.JobStatus | None:
    """Return what a list says of a job: all of one in memory, what the store notes of any other; None of one that is gone."""
    service = leadership.service
    if (run := service.jobs.get(note.job)) is not None:
        return await job_status(leadership, run, preprocessors)
    if note.job in service.set_aside:
        why = service.set_aside[note.job]
        return jobs_pb2.JobStatus(job=note.job, state=jobs_pb2.JOB_STATE_SET_ASIDE, message=why)
    if not note.is_over:
        return None
    figures = note.summary or Summary(committed_steps=note.committed_steps)
    return jobs_pb2.JobStatus(
        job=note.job,
        state=jobs_pb2.JobState.Value(f"JOB_STATE_{note.state}"),
        message=note.message,
        committed_steps=note.committed_steps,
        num_steps=figures.num_steps,
        committed_samples=figures.samples,
        quarantined_samples=figures.quarantined,
        num_shards=figures.num_shards,
        indexed_shards=figures.indexed_shards,
    )


def _runs(service: ReorderService, name: str) -> bool:
    run = service.jobs.get(name)
    return run is not None and not run.cursor.is_over


def _preprocessor_status(member: Member) -> jobs_pb2.PreprocessorStatus:
    return jobs_pb2.PreprocessorStatus(
        preprocessor=member.name,
        endpoint=member.endpoint,
        samples_decoded=member.samples_decoded,
        bytes_decoded=member.bytes_decoded,
        store_bytes=member.store_bytes,
        store_budget_bytes=member.store_budget_bytes,
        leases=len(member.leases),
        slots=member.slots,
        occupancy=member.occupancy,
        late=len(member.overdue),
        silent=member.silent,
        kept=len(member.kept),
        release=member.release,
        clock_ahead_s=member.clock_ahead_s,
    )


def _rank_status(session: Session) -> jobs_pb2.RankStatus:
    return jobs_pb2.RankStatus(
        rank=session.rank,
        committed_steps=session.next_step,
        data_wait_s=session.data_wait_s,
        step_s=session.step_s,
        connected=session.streaming,
    )


def _source_statuses(run: JobRun) -> list[jobs_pb2.SourceStatus]:
    names = [source.name for source in run.spec.sources]
    amounts = [run.cursor.progress.delivered.get(name, Amounts()) for name in names]
    return [
        jobs_pb2.SourceStatus(source=name, share=share, **given._asdict())
        for name, share, given in zip(names, run.batches.shares(run.cursor.next_step), amounts, strict=True)
    ]
