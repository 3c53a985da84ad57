"""stall NAME: a preprocessor carries out nothing by itself from now on, though it sends heartbeats; `answer` has it report late."""

from __future__ import annotations

from tests.golden.world import World


async def run(world: World, name: str) -> None:
    world.preprocessors[name].answers = frozenset()
