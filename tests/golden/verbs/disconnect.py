"""disconnect RANK: the process of a rank ends without a word, which closes its stream of plans."""

from __future__ import annotations

from tests.golden.world import World


async def run(world: World, rank: int) -> None:
    world.ranks[rank].disconnect()
