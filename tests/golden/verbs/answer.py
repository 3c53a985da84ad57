"""answer NAME [count=1]: a preprocessor carries out its oldest orders, so many of them."""

from __future__ import annotations

from tests.golden.world import World


async def run(world: World, name: str, *, count: int = 1) -> None:
    preprocessor = world.preprocessors[name]
    for lease in list(preprocessor.orders)[:count]:
        preprocessor.answer(lease)
        await world.settle()
