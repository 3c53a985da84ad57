"""topology [replicas=1] [microbatches=1] [generation=N]: plan the uncommitted steps for another topology.

`generation`: the one that the caller takes for the job's present one.
"""

from __future__ import annotations

from headrace.topology_spec import TopologySpec
from headrace.v1.jobs_pb2 import TopologyRequest
from tests.golden.world import World


async def run(world: World, *, replicas: int = 1, microbatches: int = 1, generation: int = 0) -> None:
    topology = TopologySpec(replicas=replicas, microbatches=microbatches).model_dump_json()
    request = TopologyRequest(job=world.job, topology_json=topology, generation=generation or None)
    await world.change_job(world.jobs.SetTopology, request)
