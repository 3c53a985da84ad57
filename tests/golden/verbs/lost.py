"""lost RANK PART: a rank reports that it cannot fetch a part from where it was told that it is (STEP/REPLICA/MICROBATCH/NUMBER)."""

from __future__ import annotations

from tests.golden.world import World


async def run(world: World, rank: int, part: str) -> None:
    await world.call(world.ranks[rank].who, world.ranks[rank].report_lost(part))
