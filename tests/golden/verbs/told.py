"""told [RANK ...]: print what all ranks or these were told since the last time, steps first and then where parts are."""

from __future__ import annotations

from tests.golden.world import World


async def run(world: World, *ranks: str) -> None:
    for rank in map(int, ranks) if ranks else sorted(world.ranks):
        news, world.ranks[rank].news = world.ranks[rank].news, []
        for line in sorted(news, key=lambda line: (not line.startswith("step"), line.partition(" at ")[0])):
            world.say(f"rank {rank}: {line}")
