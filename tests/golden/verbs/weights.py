"""weights STEP SOURCE=WEIGHT ...: mix the sources by other weights from this step on."""

from __future__ import annotations

from headrace.v1.jobs_pb2 import WeightsRequest
from tests.golden.world import World


async def run(world: World, step: int, **weights: str) -> None:
    numbers = {source: float(weight) for source, weight in weights.items()}
    await world.change_job(world.jobs.SetWeights, WeightsRequest(job=world.job, step=step, weights=numbers))
