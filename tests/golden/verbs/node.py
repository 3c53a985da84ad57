"""node NAME ... [generation=0]: nodes join the job. `generation`: of the snapshot that they follow; 0: they hold no model."""

from __future__ import annotations

from tests.golden.scripted_node import Node
from tests.golden.world import World


async def run(world: World, *names: str, generation: int = 0) -> None:
    for name in names:
        world.nodes.setdefault(name, Node(world=world, name=name, job=world.job, spec=world.nodes_spec)).join(generation)
        await world.settle()
