"""fail NAME SENTENCE: a preprocessor reports that it cannot carry out its oldest order."""

from __future__ import annotations

from tests.golden.world import World


async def run(world: World, name: str, sentence: str) -> None:
    preprocessor = world.preprocessors[name]
    preprocessor.fail(next(iter(preprocessor.orders)), sentence)
