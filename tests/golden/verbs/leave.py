"""leave NODE [done=0]: a node announces that it is going to end; with done=1 it has nothing left to do, and ends at once."""

from __future__ import annotations

from headrace.v1.membership_pb2 import Leave
from tests.golden.world import World


async def run(world: World, name: str, *, done: int = 0) -> None:
    node = world.nodes[name]
    node.say(leave=Leave(done=bool(done)))
    if done:
        await world.settle()
        node.end()
