"""What is said of a job is worked out once, however many sources it has: the loop that says it keeps leases too."""

from __future__ import annotations

import math

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.limits import MAX_SOURCES
from headrace.manifest import ShardTable
from headrace.reorder_service.api.jobs import JobsServicer
from headrace.reorder_service.leadership import Leadership
from headrace.v1 import jobs_pb2, jobs_pb2_grpc
from tests.unit.reorder_service.job_world import Start, submit

pytestmark = pytest.mark.timeout(60)

SOURCES, FEW = MAX_SOURCES, 4


class WatchedShards(ShardTable):
    """Counts how often somebody looks at the sources of all shards."""

    looks = 0

    @property  # type: ignore[override]
    def sources(self) -> NDArray[np.int32]:
        self.looks += 1
        return self._sources

    @sources.setter
    def sources(self, sources: NDArray[np.int32]) -> None:
        self._sources = sources


async def test_the_shares_of_many_sources_take_few_looks_at_the_shards(start: Start) -> None:
    service = await start()
    run = await submit(service, join=False, sources=[{"path": f"/d/{n}"} for n in range(SOURCES)])
    shards = WatchedShards(range(SOURCES), [f"/d/{n}/a" for n in range(SOURCES)], [f"{n}/a" for n in range(SOURCES)])
    run.manifest.shards, run.manifest.num_rows = shards, np.arange(SOURCES)
    leadership = Leadership()
    leadership.active_service, leadership.leader, leadership.lease_ends_s = service, "here", math.inf
    server = grpc.aio.server()
    jobs_pb2_grpc.add_JobsServicer_to_server(JobsServicer(leadership), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = jobs_pb2_grpc.JobsStub(channel)
            shown = await stub.Show(jobs_pb2.ShowRequest(job="job"))
            assert 1 <= shards.looks <= FEW
            (listed,) = [page async for page in stub.List(jobs_pb2.ListRequest())]
            assert shards.looks <= 2 * FEW
    finally:
        await server.stop(None)
    assert [status.share for status in shown.sources] == [n / sum(range(SOURCES)) for n in range(SOURCES)]
    assert listed.jobs[0].sources == shown.sources
