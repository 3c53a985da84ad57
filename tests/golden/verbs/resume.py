"""resume: plan further steps of the paused job."""

from __future__ import annotations

from headrace.v1.jobs_pb2 import PauseRequest
from tests.golden.world import World


async def run(world: World) -> None:
    await world.change_job(world.jobs.Pause, PauseRequest(job=world.job, paused=False))
