"""close RANK: a rank closes its session."""

from __future__ import annotations

from tests.golden.world import World


async def run(world: World, rank: int) -> None:
    await world.call(world.ranks[rank].who, world.ranks[rank].close())
