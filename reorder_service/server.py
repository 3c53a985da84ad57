"""gRPC face of the reorder service: decode, call, encode."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator

import grpc

from headrace import codec, metrics
from headrace.errors import ConflictError, NotFoundError
from headrace.rpc import Server, answers, answers_stream
from headrace.v1 import fleet_pb2, fleet_pb2_grpc, jobs_pb2, jobs_pb2_grpc, sessions_pb2, sessions_pb2_grpc
from headrace.v1.common_pb2 import Rejection
from reorder_service import messages, planning
from reorder_service.fleet import Member
from reorder_service.job import FINAL, JobRun
from reorder_service.service import ReorderService
from reorder_service.sessions import Ended, Session
from reorder_service.state import StateStore
from reorder_service.step import Part, RankCommit, Step

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
STORE_CHECK_S = 0.5  # how often to see whether the embedded store still runs
SILENCE_S = 3.0  # a preprocessor that says nothing for so long is gone: six heartbeats, so that a busy machine is not mistaken


class JobsServicer(jobs_pb2_grpc.JobsServicer):
    """Submit, show, list, cancel; ledger, quarantine and plans."""

    def __init__(self, service: ReorderService) -> None:
        self._service = service

    @answers
    async def Submit(self, request: jobs_pb2.SubmitRequest, context: grpc.aio.ServicerContext) -> jobs_pb2.SubmitReply:
        run = await self._service.submit(request.spec_json)
        return jobs_pb2.SubmitReply(job=run.name)

    @answers
    async def Show(self, request: jobs_pb2.ShowRequest, context: grpc.aio.ServicerContext) -> jobs_pb2.JobStatus:
        return await self._status(self._service.find(request.job))

    @answers
    async def List(self, request: jobs_pb2.ListRequest, context: grpc.aio.ServicerContext) -> jobs_pb2.ListReply:
        return jobs_pb2.ListReply(jobs=[await self._status(run) for run in self._service.jobs.values()])

    @answers
    async def Cancel(self, request: jobs_pb2.CancelRequest, context: grpc.aio.ServicerContext) -> jobs_pb2.JobStatus:
        run = self._service.find(request.job)
        await asyncio.shield(run.cancel())
        return await self._status(run)

    @answers_stream
    async def Ledger(
        self, request: jobs_pb2.LedgerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[jobs_pb2.LedgerEntry]:
        run = self._service.find(request.job)
        async for entry in self._service.store.ledger(run.name):
            yield jobs_pb2.LedgerEntry(step=entry.step, samples=entry.samples, loss=entry.loss)

    @answers_stream
    async def Quarantine(
        self, request: jobs_pb2.QuarantineRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Rejection]:
        run = self._service.find(request.job)
        for item in await self._service.store.quarantine(run.name):
            yield codec.rejection_message(item)

    @answers
    async def ShowPlan(self, request: jobs_pb2.ShowPlanRequest, context: grpc.aio.ServicerContext) -> jobs_pb2.ShowPlanReply:
        step = _shown_step(self._service.find(request.job), request.step)
        assert step.plan is not None
        return jobs_pb2.ShowPlanReply(
            step=step.index,
            plan_json=json.dumps(step.plan.to_json()),
            sample_ids=step.sample_ids,
            costs=[jobs_pb2.UnitCosts(unit=unit, cost_s=values) for unit, values in step.costs.items()],
        )

    async def _status(self, run: JobRun) -> jobs_pb2.JobStatus:
        store = self._service.store
        return jobs_pb2.JobStatus(
            job=run.name,
            state=jobs_pb2.JobState.Value(f"JOB_STATE_{run.state}"),
            message=run.message,
            committed_steps=run.committed,
            num_steps=run.num_steps,
            committed_samples=run.committed_samples,
            quarantined_samples=await store.num_quarantined(run.name),
            num_shards=len(run.manifest.shards),
            indexed_shards=len(run.manifest.indexed),
            first_loss=run.progress.first_loss,
            last_loss=run.progress.last_loss,
            data_wait_s=run.progress.data_wait_s,
            step_s=run.progress.step_s,
            preprocessors=[
                jobs_pb2.PreprocessorStatus(
                    preprocessor=m.name,
                    endpoint=m.endpoint,
                    samples_decoded=m.samples_decoded,
                    bytes_decoded=m.bytes_decoded,
                    store_bytes=m.store_bytes,
                    store_budget_bytes=m.store_budget_bytes,
                    leases=len(m.leases),
                )
                for m in self._service.fleet.members.values()
            ],
            spec_json=run.spec.to_json(),
            planned_steps=sum(step.plan is not None for step in run.steps.values()),
        )


def _shown_step(run: JobRun, index: int) -> Step:
    planned = [*run.recent, *(step for step in run.steps.values() if step.plan is not None)]
    if index < 0:
        full = [step for step in planned if len(step.probes) == max(len(s.probes) for s in planned) and step.probes]
        if full:
            return full[-1]
    for step in planned:
        if step.index == index and step.probes:
            return step
    raise NotFoundError(f"no plan of step {index} of job {run.name!r} is at hand: only the window and the latest steps are kept")


class SessionsServicer(sessions_pb2_grpc.SessionsServicer):
    """What trainer ranks ask."""

    def __init__(self, service: ReorderService) -> None:
        self._service = service

    @answers
    async def Open(self, request: sessions_pb2.OpenRequest, context: grpc.aio.ServicerContext) -> sessions_pb2.OpenReply:
        run = self._service.find(request.job)
        await run.wait_ready()
        if request.HasField("resume_step"):
            await asyncio.shield(run.rewind(request.resume_step))
        vocabulary = run.manifest.vocabulary
        if vocabulary is None:
            raise ConflictError(f"job {run.name!r} ended before it began: {run.message}")
        session = run.open_session(request.rank, request.num_ranks)
        return sessions_pb2.OpenReply(
            session=session.id,
            generation=run.generation,
            next_step=run.committed,
            spec_json=run.spec.to_json(),
            vocabulary=codec.vocabulary_message(vocabulary),
        )

    @answers_stream
    async def Plans(
        self, request: sessions_pb2.PlansRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[sessions_pb2.PlanEvent]:
        run, session = self._service.find_session(request.session)
        session.streaming = True
        try:
            async for event in session.events():
                yield _plan_event(event, session)
        finally:
            session.streaming = False
        self._service.find_session(request.session)  # raises where the stream ended because another took over
        log.debug("plans ended job=%s rank=%d", run.name, session.rank)

    @answers
    async def ReportLost(
        self, request: sessions_pb2.ReportLostRequest, context: grpc.aio.ServicerContext
    ) -> sessions_pb2.ReportLostReply:
        run, _ = self._service.find_session(request.session)
        run.report_lost(request.ticket, request.lease)
        return sessions_pb2.ReportLostReply()

    @answers
    async def Commit(self, request: sessions_pb2.CommitRequest, context: grpc.aio.ServicerContext) -> sessions_pb2.CommitReply:
        run, session = self._service.find_session(request.session)
        commit = RankCommit(
            rejected=tuple(codec.rejection_value(item) for item in request.rejections),
            loss=request.loss,
            step_s=request.step_s,
            data_wait_s=request.data_wait_s,
        )
        return sessions_pb2.CommitReply(committed=await run.commit(session, request.step, commit))

    @answers
    async def Close(self, request: sessions_pb2.CloseRequest, context: grpc.aio.ServicerContext) -> sessions_pb2.CloseReply:
        run, session = self._service.find_session(request.session)
        run.sessions.by_rank.pop(session.rank, None)
        session.supersede()
        return sessions_pb2.CloseReply()


def _plan_event(event: Step | Part | Ended, session: Session) -> sessions_pb2.PlanEvent:
    if isinstance(event, Step):
        return sessions_pb2.PlanEvent(plan=_rank_plan(event, session))
    if isinstance(event, Part):
        location = sessions_pb2.PartLocation(ticket=event.ticket, lease=event.lease, endpoint=event.endpoint)
        return sessions_pb2.PlanEvent(location=location)
    return sessions_pb2.PlanEvent(ended=sessions_pb2.JobEnded(message=event.message))


def _rank_plan(step: Step, session: Session) -> sessions_pb2.RankPlan:
    assert step.plan is not None
    tickets: dict[tuple[int, int], list[str]] = {}
    for part in step.parts.values():
        tickets.setdefault((part.microbatch, part.replica), []).append(part.ticket)
    microbatches = [
        sessions_pb2.RankMicrobatch(
            replica=r, index=k, tickets=tickets.get((k, r), ()), num_samples=len(step.plan.replicas[r][k].sample_ids)
        )
        for k in range(max(map(len, step.plan.replicas)))
        for r in range(session.rank, len(step.plan.replicas), session.num_ranks)
        if k < len(step.plan.replicas[r])
    ]
    return sessions_pb2.RankPlan(step=step.index, microbatches=microbatches, num_samples=len(step.probes))


class FleetServicer(fleet_pb2_grpc.FleetServicer):
    """One stream a preprocessor."""

    def __init__(self, service: ReorderService) -> None:
        self._service = service

    async def Work(
        self, reports: AsyncIterator[fleet_pb2.FleetReport], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[fleet_pb2.FleetOrder]:
        outbox: asyncio.Queue[fleet_pb2.FleetOrder | None] = asyncio.Queue()
        welcome = fleet_pb2.Welcome(heartbeat_s=HEARTBEAT_S, jobs=self._service.running_jobs())
        outbox.put_nowait(fleet_pb2.FleetOrder(welcome=welcome))
        reader = asyncio.create_task(self._read(aiter(reports), outbox))
        try:
            while (order := await outbox.get()) is not None:
                yield order
            await reader  # raises what broke it, if anything did
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(
        self, reports: AsyncIterator[fleet_pb2.FleetReport], outbox: asyncio.Queue[fleet_pb2.FleetOrder | None]
    ) -> None:
        member: Member | None = None
        why = "connection closed"
        try:
            while True:
                report = await asyncio.wait_for(anext(reports), SILENCE_S)
                if report.WhichOneof("report") == "goodbye":
                    why = "departed"
                    return
                if report.WhichOneof("report") == "hello":
                    member = self._join(report.hello, outbox)
                elif member is not None:
                    self._hear(member, report)
        except TimeoutError:
            why = f"silent for {SILENCE_S:g} s"
        except StopAsyncIteration:
            pass
        finally:
            if member is not None:
                self._service.fleet.leave(member, why)
            outbox.put_nowait(None)

    def _join(self, hello: fleet_pb2.Hello, outbox: asyncio.Queue[fleet_pb2.FleetOrder | None]) -> Member:
        member = Member(
            name=hello.preprocessor,
            endpoint=hello.endpoint,
            slots=hello.slots,
            send=outbox.put_nowait,
            introduce=self._introduce,
        )
        self._service.fleet.join(member)
        return member

    def _introduce(self, job: str) -> fleet_pb2.FleetOrder:
        run = self._service.find(job)
        return messages.job_opened(job, run.spec.to_json(), run.manifest.shards, run.key)

    def _hear(self, member: Member, report: fleet_pb2.FleetReport) -> None:
        kind = report.WhichOneof("report")
        if kind == "heartbeat":
            beat = report.heartbeat
            member.samples_decoded, member.bytes_decoded = beat.samples_decoded, beat.bytes_decoded
            member.store_bytes, member.store_budget_bytes = beat.store_bytes, beat.store_budget_bytes
        elif kind == "order_failed":
            self._service.fleet.fail(member, report.order_failed.lease, report.order_failed.error)
        elif kind is not None:
            result = getattr(report, kind)
            self._service.fleet.finish(member, result.lease, result)


def _watch(service: ReorderService) -> None:
    """Let the gauges of this process show the service; they are read in another thread."""

    def parts(*, placed: bool) -> int:
        steps = [step for run in list(service.jobs.values()) for step in list(run.steps.values())]
        return sum(bool(part.endpoint) == placed for step in steps for part in list(step.parts.values()))

    members = service.fleet.members
    metrics.MEMBERS.set_function(lambda: len(members))
    metrics.LEASES.set_function(lambda: sum(len(member.leases) for member in list(members.values())))
    metrics.JOBS.set_function(lambda: sum(run.state not in FINAL for run in list(service.jobs.values())))
    metrics.PLANNED_STEPS.set_function(
        lambda: sum(step.plan is not None for run in list(service.jobs.values()) for step in list(run.steps.values()))
    )
    metrics.watch(metrics.PARTS, {"waiting": lambda: parts(placed=False), "placed": lambda: parts(placed=True)})


async def serve(listen: str, store_url: str, metrics_listen: str = "") -> None:
    """Run until cancelled. Raises UserError where a port or the store cannot be had, UnavailableError where it is lost.

    `metrics_listen`: HOST:PORT of the metrics; empty: none.
    """
    with metrics.exported(metrics_listen, metrics.REORDER):
        await _serve(listen, store_url)


async def _serve(listen: str, store_url: str) -> None:
    store = await StateStore.open(store_url)
    service = ReorderService(store)
    _watch(service)
    try:
        server = Server(
            listen,
            {
                "headrace.v1.Jobs": lambda s: jobs_pb2_grpc.add_JobsServicer_to_server(JobsServicer(service), s),
                "headrace.v1.Sessions": lambda s: sessions_pb2_grpc.add_SessionsServicer_to_server(SessionsServicer(service), s),
                "headrace.v1.Fleet": lambda s: fleet_pb2_grpc.add_FleetServicer_to_server(FleetServicer(service), s),
            },
        )
        await asyncio.to_thread(planning.warm_up)
        await service.start()
        await server.start()
        print(f"headrace reorder service listening on {server.endpoint}", flush=True)
        try:
            while True:
                await asyncio.sleep(STORE_CHECK_S)
                store.check()
        finally:
            await server.stop(0.2)
    finally:
        await service.stop()
