"""ledger: print the samples of each committed step of the job."""

from __future__ import annotations

from headrace.v1.jobs_pb2 import LedgerRequest
from tests.golden.world import Call, World


async def run(world: World) -> None:
    async for entry in world.jobs.Ledger(LedgerRequest(job=world.job), Call()):
        world.say(f"step {entry.step}: {' '.join(entry.samples)}")
