"""lost RANK PART [at=ENDPOINT]: a rank reports that it cannot fetch a part, STEP/REPLICA/MICROBATCH/NUMBER, from its place.

`at`: the place, of those that the rank was told; without, the newest.
"""

from __future__ import annotations

from tests.golden.world import World


async def run(world: World, rank: int, part: str, *, at: str = "") -> None:
    await world.call(world.ranks[rank].who, world.ranks[rank].report_lost(part, at))
