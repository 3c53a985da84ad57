"""goodbye NAME: a preprocessor announces that it leaves, and leaves."""

from __future__ import annotations

from tests.golden.world import World


async def run(world: World, name: str) -> None:
    world.preprocessors.pop(name).goodbye()
