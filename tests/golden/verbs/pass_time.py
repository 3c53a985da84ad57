"""pass_time SECONDS: let time pass. Nothing else does, and all clients send their heartbeats meanwhile."""

from __future__ import annotations

from tests.golden.world import World


async def run(world: World, seconds: float) -> None:
    await world.pass_s(seconds)
