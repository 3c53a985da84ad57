"""hang NAME: a preprocessor or a node does and says nothing from now on, and its stream stays open."""

from __future__ import annotations

from tests.golden.world import World


async def run(world: World, name: str) -> None:
    (world.preprocessors.get(name) or world.nodes[name]).hangs = True
