"""fail NAME SENTENCE [count=1]: a preprocessor reports that it cannot carry out its oldest orders, so many of them."""

from __future__ import annotations

from tests.golden.world import World


async def run(world: World, name: str, sentence: str, *, count: int = 1) -> None:
    preprocessor = world.preprocessors[name]
    for lease in list(preprocessor.orders)[:count]:
        preprocessor.fail(lease, sentence)
