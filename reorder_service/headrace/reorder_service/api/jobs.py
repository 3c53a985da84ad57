"""gRPC servicer for people and tools, such as the command line: it submits, shows, changes and audits jobs."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator

import grpc

from headrace import message_codec
from headrace.admission import PROTOCOL, release
from headrace.errors import LimitError, UserError
from headrace.execution_spec import load_execution_json
from headrace.manifest import PAGE_SHARDS
from headrace.refusals import Reason, Refusals
from headrace.reorder_service.api.job_statuses import (
    LIST_PAGE,
    job_status,
    listed_names,
    listed_statuses,
    preprocessor_statuses,
    shown_step,
)
from headrace.reorder_service.jobs.stopping import to_its_end
from headrace.reorder_service.leadership import Leadership
from headrace.reorder_service.store.durability import DURABLE
from headrace.rpc import stream_method, unary_method
from headrace.topology_spec import load_topology_json
from headrace.v1 import jobs_pb2, jobs_pb2_grpc
from headrace.v1.common_pb2 import Rejection


class JobsServicer(jobs_pb2_grpc.JobsServicer):
    """Serves requests about the service and about jobs: submit, show, list, change, cancel, delete, and read manifest, ledger,
    quarantine and plans."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership
        self._refusals = Refusals()

    @unary_method
    async def Submit(self, request: jobs_pb2.SubmitRequest, context: grpc.aio.ServicerContext) -> jobs_pb2.SubmitReply:
        try:
            run = await self._leadership.service.submit(request.spec_json, peer=context.peer())
        except LimitError:
            self._refusals.note(Reason.TOO_MANY_JOBS, "/headrace.v1.Jobs/Submit", context)
            raise
        return jobs_pb2.SubmitReply(job=run.name)

    @unary_method
    async def Show(self, request: jobs_pb2.ShowRequest, context: grpc.aio.ServicerContext) -> jobs_pb2.JobStatus:
        return await job_status(self._leadership, await self._leadership.service.load(request.job))

    @stream_method
    async def List(self, request: jobs_pb2.ListRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[jobs_pb2.ListReply]:
        if request.finished < 0:
            raise UserError(f"{request.finished} finished jobs are none: name a number from 1 on, or 0 for all")
        names = await listed_names(self._leadership.service, request.finished)
        for start in range(0, len(names), LIST_PAGE):
            yield jobs_pb2.ListReply(jobs=await listed_statuses(self._leadership, names[start : start + LIST_PAGE]))

    @unary_method
    async def Delete(self, request: jobs_pb2.DeleteRequest, context: grpc.aio.ServicerContext) -> jobs_pb2.DeleteReply:
        await to_its_end(self._leadership.service.delete_with_evaluations(request.job))
        return jobs_pb2.DeleteReply()

    @unary_method
    async def Cancel(self, request: jobs_pb2.CancelRequest, context: grpc.aio.ServicerContext) -> jobs_pb2.JobStatus:
        return await job_status(self._leadership, await to_its_end(self._leadership.service.cancel_with_evaluations(request.job)))

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
        return await job_status(self._leadership, run)

    @unary_method
    async def Reset(self, request: jobs_pb2.ResetRequest, context: grpc.aio.ServicerContext) -> jobs_pb2.JobStatus:
        run = await self._leadership.service.load(request.job)
        await to_its_end(run.rewind(request.step))
        return await job_status(self._leadership, run)

    @unary_method
    async def SetWeights(self, request: jobs_pb2.WeightsRequest, context: grpc.aio.ServicerContext) -> jobs_pb2.JobStatus:
        run = await self._leadership.service.load(request.job)
        await to_its_end(run.set_weights(request.step, dict(request.weights)))
        return await job_status(self._leadership, run)

    @unary_method
    async def SetTopology(self, request: jobs_pb2.TopologyRequest, context: grpc.aio.ServicerContext) -> jobs_pb2.JobStatus:
        run = await self._leadership.service.load(request.job)
        generation = request.generation if request.HasField("generation") else None
        execution = load_execution_json(request.execution_json) if request.execution_json else None
        await to_its_end(run.set_topology(load_topology_json(request.topology_json), generation, execution))
        return await job_status(self._leadership, run)

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
        step = shown_step(await self._leadership.service.load(request.job), request.step)
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
            preprocessors=preprocessor_statuses(service),
        )
