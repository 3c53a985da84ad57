"""relayed HOST: print what came over a host's stream since the last time, what several of its ranks share once."""

from __future__ import annotations

from tests.golden.world import World


async def run(world: World, host: str) -> None:
    news, world.hosts[host].news = world.hosts[host].news, []
    for line in sorted(news, key=lambda line: (": step" not in line, line.partition(" at ")[0])):
        world.say(line)
