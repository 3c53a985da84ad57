"""heard [NAME ...]: print what nodes were told since the last time, all of them or those named."""

from __future__ import annotations

from tests.golden.world import World


async def run(world: World, *names: str) -> None:
    for name in names or world.nodes:
        news, world.nodes[name].news = world.nodes[name].news, []
        for line in news:
            world.say(f"node {name}: {line}")
