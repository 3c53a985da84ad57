"""The process of the reorder service: it listens, stands by until it leads, and serves while it does."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import math
import sys
import uuid
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from headrace.errors import UnavailableError
from headrace.identity import Identity
from headrace.observability import metrics
from headrace.reorder_service import planning
from headrace.reorder_service.api.fleet import FleetServicer
from headrace.reorder_service.api.jobs import JobsServicer
from headrace.reorder_service.api.membership import MembershipServicer
from headrace.reorder_service.api.sessions import SessionsServicer, add_to_server
from headrace.reorder_service.compiling import compiled
from headrace.reorder_service.fleet.member import Member
from headrace.reorder_service.jobs.job import JobRun
from headrace.reorder_service.jobs.job_figures import figures_of
from headrace.reorder_service.jobs.planned_step import PlannedStep
from headrace.reorder_service.jobs.stopping import stop_task
from headrace.reorder_service.keep_finished import KeepFinished
from headrace.reorder_service.leadership import Leadership, keep_leading, wait_until_leader
from headrace.reorder_service.nodes import snapshots
from headrace.reorder_service.service import ReorderService
from headrace.reorder_service.store.state import StateStore
from headrace.rpc import Server
from headrace.token_folder import TokenFolder
from headrace.transport.malloc import keep_freed_pages
from headrace.v1 import fleet_pb2_grpc, jobs_pb2_grpc, membership_pb2_grpc

PageMaker = Callable[[Leadership, str], AbstractAsyncContextManager[object]]
"""Serves the page of a service with this endpoint during a block."""

# A large job's window has millions of objects and few cycles. So full collections, which are long pauses, are rare, and those of
# the second generation look at the survivors of a few of the first: their pauses are in proportion to these.
GC_THRESHOLDS = (50_000, 2, 500)
SWITCH_S = 0.0005  # default 5 ms, which every turn of the event loop would wait for a thread that plans
STOP_GRACE_S = 0.2  # for calls in progress to finish when the server stops


def _set_up_gauges(leadership: Leadership) -> None:
    """Let the gauges of this process show the state of its service. Another thread reads them."""

    def jobs() -> list[JobRun]:
        return list(leadership.active_service.jobs.values()) if leadership.active_service is not None else []

    def members() -> list[Member]:
        return list(leadership.active_service.fleet.members.values()) if leadership.active_service is not None else []

    def steps() -> list[PlannedStep]:
        return [step for run in jobs() for step in list(run.cursor.steps.values())]

    def parts(*, placed: bool) -> int:
        return sum(bool(part.endpoint) == placed for step in steps() for part in list(step.parts.values()))

    metrics.LEADERS.set_function(lambda: leadership.active_service is not None)
    metrics.MEMBERS.set_function(lambda: len(members()))
    metrics.LEASES.set_function(lambda: sum(len(member.leases) for member in members()))
    metrics.JOB_FIGURES.source = lambda: figures_of(jobs())
    metrics.JOBS.set_function(lambda: sum(not run.cursor.is_over for run in jobs()))
    metrics.PLANNED_STEPS.set_function(lambda: sum(step.plan is not None for step in steps()))
    metrics.watch(metrics.PARTS, {"waiting": lambda: parts(placed=False), "placed": lambda: parts(placed=True)})


async def serve(
    listen: str,
    store_url: str,
    metrics_listen: str = "",
    *,
    page_listen: str = "",
    page_for_any_host: bool = False,
    token: str = "",
    tokens: TokenFolder | None = None,
    identity: Identity | None = None,
    keep: KeepFinished | None = None,
    memory_bytes: float = math.inf,
    max_jobs: float = math.inf,
    calls_per_s: float = math.inf,
) -> None:
    """Run a reorder service until cancelled.

    `metrics_listen`: HOST:PORT to export metrics; empty: none. `page_listen`: HOST:PORT to serve the web page; empty: none.
    `page_for_any_host`: whether browsers may know it by any host name where there is no token. `token`: of the cluster, with
    which one may do everything. `tokens`: those with roles. Without any, every caller is served. `identity`: for TLS; None: plain
    text. `keep`: which finished jobs are kept; None: all of them. `memory_bytes`: how much memory this process may use.
    `max_jobs`: how many that have not ended it takes. `calls_per_s`: most calls of the Jobs service, and most requests of the
    page, that it answers to one host.

    Raises UserError where a port or the store cannot be opened, ConflictError where the store is in use or of another release,
    and UnavailableError where an embedded store is lost.
    """
    make_page: PageMaker = _no_page
    if page_listen:
        from headrace.reorder_service.page.page_server import PageOptions, page_served  # a fifth of a second for aiohttp

        options = PageOptions(
            listen=page_listen,
            token=token,
            tokens=tokens,
            identity=identity,
            calls_per_s=calls_per_s,
            any_host=page_for_any_host,
        )
        make_page = functools.partial(page_served, options)
    with metrics.exported(metrics_listen, metrics.REORDER):
        store = await StateStore.open(store_url)
        try:
            make_server = functools.partial(Server, identity=identity, token=token, tokens=tokens, calls_per_s=calls_per_s)
            await _serve(listen, make_server, lambda: ReorderService(store, keep, memory_bytes, max_jobs), make_page)
        finally:
            await store.close()


def _no_page(_leadership: Leadership, _endpoint: str) -> AbstractAsyncContextManager[object]:
    return contextlib.nullcontext()


async def _serve(
    listen: str,
    make_server: Callable[..., Server],
    make_service: Callable[[], ReorderService],
    make_page: PageMaker,
) -> None:
    leadership = Leadership()
    leadership.starting = True
    _set_up_gauges(leadership)
    server = make_server(
        listen,
        {
            "headrace.v1.Jobs": lambda s: jobs_pb2_grpc.add_JobsServicer_to_server(JobsServicer(leadership), s),
            "headrace.v1.Sessions": lambda s: add_to_server(SessionsServicer(leadership), s),
            "headrace.v1.Fleet": lambda s: fleet_pb2_grpc.add_FleetServicer_to_server(FleetServicer(leadership), s),
            "headrace.v1.Membership": lambda s: membership_pb2_grpc.add_MembershipServicer_to_server(
                MembershipServicer(leadership), s
            ),
        },
    )
    await server.start(serving=False, starting=True)
    name = f"{server.endpoint} {uuid.uuid4().hex[:8]}"
    try:
        async with make_page(leadership, server.endpoint):
            await _warm_up()
            gc.freeze()
            gc.set_threshold(*GC_THRESHOLDS)
            sys.setswitchinterval(SWITCH_S)
            leadership.starting = False
            await server.set_starting(False)
            print(f"headrace reorder service listening on {server.endpoint}", flush=True)
            while True:
                service = make_service()
                await wait_until_leader(service.store.database, name, leadership)
                await _lead(service, name, leadership, server)
    finally:
        await server.stop(STOP_GRACE_S)


async def _warm_up() -> None:
    """Load the compiled planner, or compile it. Clients that connect meanwhile are told that this process is starting."""

    keep_freed_pages()  # a third of a large plan's time is the first touch of fresh pages otherwise

    def warm_up() -> None:
        planning.warm_up()
        snapshots.warm_up()

    await compiled(warm_up)


async def _lead(service: ReorderService, name: str, leadership: Leadership, server: Server) -> None:
    """Serve until another process leads or may lead, or until cancelled. Then give up the lease, so that a standby takes over."""
    store = service.store

    async def set_serving(serving: bool) -> None:
        await server.set_serving(serving and leadership.active_service is service)

    keeping = asyncio.create_task(keep_leading(store.database, name, leadership, set_serving))
    taking_up = asyncio.create_task(service.start())
    try:
        await asyncio.wait({keeping, taking_up}, return_when=asyncio.FIRST_COMPLETED)
        if not keeping.done():
            taking_up.result()  # raises what kept it from taking over the jobs: this process ends, another may lead
            leadership.active_service = service
            await server.set_serving(True)
        await keeping
    finally:
        await stop_task(taking_up)
        await stop_task(keeping)
        await server.set_serving(False)
        leadership.active_service = None
        await service.stop()
        with contextlib.suppress(UnavailableError):
            await store.database.resign(name)
