"""The list of jobs as it is served: in pages, in order, with few finished ones or with all."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest

from headrace.reorder_service.api import job_statuses, jobs
from headrace.reorder_service.api.jobs import JobsServicer
from headrace.reorder_service.leadership import Leadership
from headrace.reorder_service.store.finished_jobs import Summary
from headrace.v1 import jobs_pb2, jobs_pb2_grpc
from tests.unit.reorder_service.job_world import Start, submit

FINISHED, PAGE = 7, 2

Pages = Callable[[int], Awaitable[list[list[jobs_pb2.JobStatus]]]]


@pytest.fixture
async def pages(start: Start, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pages]:
    """Of a service with jobs over0 to over6, of which only the store knows, and jobs a and z before and after them."""
    for module in (jobs, job_statuses):
        monkeypatch.setattr(module, "LIST_PAGE", PAGE)
    service = await start()
    await submit(service, name="a", join=False)
    for number in range(FINISHED):
        await service.store.create_job(f"over{number}", "{}")
        await service.store.set_state(f"over{number}", "FAILED", "why")
        await service.store.finished.note(f"over{number}", 1e9, Summary(committed_steps=0, num_steps=9, samples=number))
    await submit(service, name="z", join=False)
    await service.store.create_job("unreadable", "{}")
    service = await start()
    leadership = Leadership()
    leadership.active_service, leadership.leader, leadership.lease_ends_s = service, "here", math.inf
    server = grpc.aio.server()
    jobs_pb2_grpc.add_JobsServicer_to_server(JobsServicer(leadership), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = jobs_pb2_grpc.JobsStub(channel)

        async def read(finished: int) -> list[list[jobs_pb2.JobStatus]]:
            return [list(page.jobs) async for page in stub.List(jobs_pb2.ListRequest(finished=finished))]

        yield read
    await server.stop(None)


async def test_all_jobs_are_listed_in_pages_in_the_order_of_their_submission(pages: Pages) -> None:
    listed = await pages(0)
    assert max(map(len, listed)) == PAGE
    jobs = [status for page in listed for status in page]
    assert [status.job for status in jobs] == ["a", *(f"over{n}" for n in range(FINISHED)), "z", "unreadable"]
    assert [status.state for status in jobs[-2:]] == [jobs_pb2.JOB_STATE_INDEXING, jobs_pb2.JOB_STATE_SET_ASIDE]
    over = jobs[4]
    assert (over.state, over.message, over.num_steps, over.committed_samples) == (jobs_pb2.JOB_STATE_FAILED, "why", 9, 3)


@pytest.mark.parametrize("most", [1, 3, FINISHED, 99])
async def test_of_finished_jobs_the_latest_are_listed_beside_all_that_run(pages: Pages, most: int) -> None:
    latest = [f"over{n}" for n in range(FINISHED)][-most:]
    assert [status.job for page in await pages(most) for status in page] == ["a", *latest, "z", "unreadable"]


async def test_a_negative_number_of_jobs_is_refused(pages: Pages) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="-1 finished jobs are none"):
        await pages(-1)
