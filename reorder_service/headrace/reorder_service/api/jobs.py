"""gRPC servicer for people and tools, such as the command line: it submits, shows, changes and audits jobs."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence

import grpc

from headrace import message_codec
from headrace.admission import PROTOCOL, release
from headrace.errors import LimitError, NotFoundError, UserError
from headrace.execution_spec import load_execution_json
from headrace.manifest import PAGE_SHARDS
from headrace.refusals import Reason, Refusals
from headrace.reorder_service.fleet.member import Member
from headrace.reorder_service.jobs.job import JobRun
from headrace.reorder_service.jobs.planned_step import PlannedStep
from headrace.reorder_service.jobs.sessions import Session
from headrace.reorder_service.jobs.stopping import to_its_end
from headrace.reorder_service.leadership import Leadership
from headrace.reorder_service.service import ReorderService
from headrace.reorder_service.store.durability import DURABLE
from headrace.reorder_service.store.finished_jobs import JobNote, Summary
from headrace.reorder_service.store.progress import Amounts
from headrace.rpc import stream_method, unary_method
from headrace.topology_spec import load_topology_json
from headrace.v1 import jobs_pb2, jobs_pb2_grpc
from headrace.v1.common_pb2 import Rejection

LIST_PAGE = 200  # jobs of a reply: also with a thousand ranks and preprocessors each well below the largest message


class JobsServicer(jobs_pb2_grpc.JobsServicer):
    """Serves requests about the service and about jobs: submit, show, list, change, cancel, delete, and read manifest, ledger,
    quarantine and plans."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership
        self._refusals = Refusals()

    @unary_method
    async def Submit(self, request: jobs_pb2.SubmitRequest, context: grpc.aio.ServicerContext) -> jobs_pb2.SubmitReply:
        try:
            run = await self._leadership.service.submit(request.spec_json)
        except LimitError:
            self._refusals.note(Reason.TOO_MANY_JOBS, "/headrace.v1.Jobs/Submit", context)
            raise
        return jobs_pb2.SubmitReply(job=run.name)

    @unary_method
    async def Show(self, request: jobs_pb2.ShowRequest, context: grpc.aio.ServicerContext) -> jobs_pb2.JobStatus:
        return await self._status(await self._leadership.service.load(request.job))

    @stream_method
    async def List(self, request: jobs_pb2.ListRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[jobs_pb2.ListReply]:
        if request.finished < 0:
            raise UserError(f"{request.finished} finished jobs are none: name a number from 1 on, or 0 for all")
        service = self._leadership.service
        names = await service.store.jobs()
        latest = await self._latest_finished(names, request.finished) if request.finished else None
        if latest is not None:
            names = [name for name in names if name in latest or name in service.set_aside or _runs(service, name)]
        for start in range(0, len(names), LIST_PAGE):
            notes = await service.store.finished.read(names[start : start + LIST_PAGE])
            yield jobs_pb2.ListReply(jobs=[status for note in notes if (status := await self._listed(note)) is not None])

    async def _latest_finished(self, names: Sequence[str], most: int) -> set[str]:
        """Return the names of the finished jobs that were submitted last, at most so many."""
        latest: list[str] = []
        for stop in range(len(names), 0, -LIST_PAGE):
            notes = await self._leadership.service.store.finished.read(names[max(0, stop - LIST_PAGE) : stop])
            latest += [note.job for note in reversed(notes) if note.is_over]
            if len(latest) >= most:
                break
        return set(latest[:most])

    async def _listed(self, note: JobNote) -> jobs_pb2.JobStatus | None:
        """Return what a list says of a job: all of one in memory, what the store notes of any other; None of one that is gone."""
        service = self._leadership.service
        if (run := service.jobs.get(note.job)) is not None:
            return await self._status(run)
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

    @unary_method
    async def Delete(self, request: jobs_pb2.DeleteRequest, context: grpc.aio.ServicerContext) -> jobs_pb2.DeleteReply:
        await to_its_end(self._leadership.service.delete_with_evaluations(request.job))
        return jobs_pb2.DeleteReply()

    @unary_method
    async def Cancel(self, request: jobs_pb2.CancelRequest, context: grpc.aio.ServicerContext) -> jobs_pb2.JobStatus:
        return await self._status(await to_its_end(self._leadership.service.cancel_with_evaluations(request.job)))

    @stream_method
    async def Manifest(
        self, request: jobs_pb2.ManifestRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[jobs_pb2.ManifestPage]:
        manifest = (await self._leadership.service.load(request.job)).manifest
        shards, num_rows = manifest.shards, manifest.num_rows
        for start in range(0, len(shards), PAGE_SHARDS):
            yield jobs_pb2.ManifestPage(
                shards=[
                    jobs_pb2.ManifestShard(shard=message_codec.shard_message(number, shard), num_samples=num_rows[number])
                    for number, shard in enumerate(shards[start : start + PAGE_SHARDS], start)
                ]
            )

    @unary_method
    async def Pause(self, request: jobs_pb2.PauseRequest, context: grpc.aio.ServicerContext) -> jobs_pb2.JobStatus:
        run = await self._leadership.service.load(request.job)
        await to_its_end(run.pause(request.paused))
        return await self._status(run)

    @unary_method
    async def Reset(self, request: jobs_pb2.ResetRequest, context: grpc.aio.ServicerContext) -> jobs_pb2.JobStatus:
        run = await self._leadership.service.load(request.job)
        await to_its_end(run.rewind(request.step))
        return await self._status(run)

    @unary_method
    async def SetWeights(self, request: jobs_pb2.WeightsRequest, context: grpc.aio.ServicerContext) -> jobs_pb2.JobStatus:
        run = await self._leadership.service.load(request.job)
        await to_its_end(run.set_weights(request.step, dict(request.weights)))
        return await self._status(run)

    @unary_method
    async def SetTopology(self, request: jobs_pb2.TopologyRequest, context: grpc.aio.ServicerContext) -> jobs_pb2.JobStatus:
        run = await self._leadership.service.load(request.job)
        generation = request.generation if request.HasField("generation") else None
        execution = load_execution_json(request.execution_json) if request.execution_json else None
        await to_its_end(run.set_topology(load_topology_json(request.topology_json), generation, execution))
        return await self._status(run)

    @stream_method
    async def Ledger(
        self, request: jobs_pb2.LedgerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[jobs_pb2.LedgerEntry]:
        run = await self._leadership.service.load(request.job)
        if request.start < 0 or request.count < 0:
            raise UserError(f"{request.count} steps from step {request.start} on are none: steps count from 0, and so do they")
        async for entry in self._leadership.service.store.ledger(run.name, request.start):
            if request.count and entry.step >= request.start + request.count:
                return
            yield jobs_pb2.LedgerEntry(step=entry.step, samples=entry.samples, loss=entry.loss)

    @stream_method
    async def Quarantine(
        self, request: jobs_pb2.QuarantineRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Rejection]:
        run = await self._leadership.service.load(request.job)
        async for item in self._leadership.service.store.quarantine(run.name):
            yield message_codec.rejection_message(item)

    @unary_method
    async def ShowPlan(self, request: jobs_pb2.ShowPlanRequest, context: grpc.aio.ServicerContext) -> jobs_pb2.ShowPlanReply:
        step = _shown_step(await self._leadership.service.load(request.job), request.step)
        assert step.plan is not None
        return jobs_pb2.ShowPlanReply(
            step=step.index,
            plan_json=json.dumps(step.plan.to_json()),
            sample_ids=step.sample_ids,
            costs=[jobs_pb2.UnitCosts(unit=unit, cost_s=values) for unit, values in step.costs.items()],
        )

    @unary_method
    async def About(self, request: jobs_pb2.AboutRequest, context: grpc.aio.ServicerContext) -> jobs_pb2.ServiceStatus:
        service = self._leadership.service
        database = service.store.database
        forgetful = await database.forgetful_settings()
        return jobs_pb2.ServiceStatus(
            release=release(),
            protocol=PROTOCOL,
            leader=self._leadership.leader.split()[0],
            term=database.term,
            up_s=time.monotonic() - service.began_s,
            clock_s=time.time(),
            embedded_store=database.is_embedded,
            store_tells=forgetful is not None,
            forgetful=[
                jobs_pb2.StoreSetting(name=name, value=value, wanted=DURABLE[name]) for name, value in (forgetful or {}).items()
            ],
            preprocessors=map(_preprocessor_status, service.fleet.members.values()),
        )

    async def _status(self, run: JobRun) -> jobs_pb2.JobStatus:
        service = self._leadership.service
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
            preprocessors=map(_preprocessor_status, service.fleet.members.values()),
            spec_json=run.planned_spec.to_json(),
            planned_steps=sum(step.plan is not None for step in run.cursor.steps.values()),
            planned_bytes=sum(step.num_bytes or 0 for step in run.cursor.steps.values()),
            window_bytes=run.window_bytes,
            warning=run.warning,
            paused=run.paused,
            generation=run.generation,
            topology_json=run.planned_spec.topology.model_dump_json(),
            leader=self._leadership.leader.split()[0],
            term=service.store.database.term,
            ranks=[_rank_status(session) for _, session in sorted(run.sessions.by_rank.items())],
            sources=_source_statuses(run),
            up_s=time.monotonic() - service.began_s,
            mixture_json=json.dumps(run.batches.changes),
            snapshot=nodes.snapshot if nodes.snapshot.generation else None,
            recoveries=nodes.recoveries,
            nodes=[jobs_pb2.NodeStatus(node=name, connected=here, leaving=leaving) for name, here, leaving in nodes.present],
        )


def _runs(service: ReorderService, job: str) -> bool:
    run = service.jobs.get(job)
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


def _shown_step(run: JobRun, index: int) -> PlannedStep:
    planned = [*run.cursor.recent, *(step for step in run.cursor.steps.values() if step.plan is not None)]
    if index < 0:
        full = [step for step in planned if len(step.probes) == max(len(s.probes) for s in planned) and step.probes]
        if full:
            return full[-1]
    for step in planned:
        if step.index == index and step.probes:
            return step
    raise NotFoundError(f"no plan of step {index} of job {run.name!r} is at hand: only the window and the latest steps are kept")
