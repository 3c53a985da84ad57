"""recovered NODE STEP: a node says that training goes on, with this step, in the pipelines that it was told last."""

from __future__ import annotations

from headrace.v1.membership_pb2 import Formation, Recovered
from tests.golden.world import World


async def run(world: World, name: str, step: int) -> None:
    node = world.nodes[name]
    generation = node.snapshot.generation
    formation = Formation(generation=generation, first_step=step, pipelines=node.snapshot.pipelines)
    node.say(recovered=Recovered(generation=generation, step=step, formation=formation))
