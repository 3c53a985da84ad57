"""reset STEP: undo the commits of this step and of all later ones."""

from __future__ import annotations

from headrace.v1.jobs_pb2 import ResetRequest
from tests.golden.world import World


async def run(world: World, step: int) -> None:
    await world.change_job(world.jobs.Reset, ResetRequest(job=world.job, step=step))
