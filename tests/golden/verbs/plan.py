"""plan STEP: print the samples of each microbatch of a planned step, by their places in the global order."""

from __future__ import annotations

import json

from headrace.plan import StepPlan
from headrace.v1.jobs_pb2 import ShowPlanRequest
from tests.golden.world import Call, World


async def run(world: World, step: int) -> None:
    async def show() -> str:
        reply = await world.jobs.ShowPlan(ShowPlanRequest(job=world.job, step=step), Call())
        plan = StepPlan.from_json(json.loads(reply.plan_json))
        slots = (
            f"{r}/{k}={','.join(map(str, sorted(microbatch.sample_ids)))}"
            for r, replica in enumerate(plan.replicas)
            for k, microbatch in enumerate(replica)
        )
        return f"generation {plan.generation}, samples of its microbatches {' '.join(slots)}"

    await world.call(f"step {step}", show())
