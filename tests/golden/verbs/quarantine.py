"""quarantine: print the samples of the job that are not used, each with its reason."""

from __future__ import annotations

from headrace.v1.jobs_pb2 import QuarantineRequest
from tests.golden.world import Call, World


async def run(world: World) -> None:
    items = [item async for item in world.jobs.Quarantine(QuarantineRequest(job=world.job), Call())]
    for item in sorted(items, key=lambda item: item.name):
        world.say(f"{item.name} {item.reason}: {item.detail}")
