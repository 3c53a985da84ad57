"""stall NAME [KIND ...]: a preprocessor keeps its orders of these kinds, or of all, until `answer`. Its heartbeats go on."""

from __future__ import annotations

from tests.golden.world import World


async def run(world: World, name: str, *kinds: str) -> None:
    preprocessor = world.preprocessors[name]
    preprocessor.answers = preprocessor.answers - set(kinds) if kinds else frozenset()
