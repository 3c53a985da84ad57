"""cancel: end the job."""

from __future__ import annotations

from headrace.v1.jobs_pb2 import CancelRequest
from tests.golden.world import World


async def run(world: World) -> None:
    await world.change_job(world.jobs.Cancel, CancelRequest(job=world.job))
