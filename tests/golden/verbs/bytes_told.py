"""bytes_told: print which ranks were told their plans by the same bytes since they opened their sessions."""

from __future__ import annotations

from tests.golden.world import World


async def run(world: World) -> None:
    alike: dict[bytes, list[int]] = {}
    for rank in world.ranks.values():
        alike.setdefault(b"".join(rank.messages), []).append(rank.rank)
    for ranks in alike.values():
        world.say(f"the same bytes: rank {', '.join(map(str, ranks))}")
