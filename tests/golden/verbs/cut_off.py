"""cut_off NODE: a node says that its connections to other nodes broke, though it knows of no loss."""

from __future__ import annotations

from headrace.v1.membership_pb2 import CutOff
from tests.golden.world import World


async def run(world: World, name: str) -> None:
    node = world.nodes[name]
    node.say(cut_off=CutOff(generation=node.snapshot.generation))
