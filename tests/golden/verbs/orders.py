"""orders [NAME ...]: print the orders that preprocessors have not carried out, of all or of those named, the oldest first."""

from __future__ import annotations

from tests.golden.scripted_preprocessor import said
from tests.golden.world import World


async def run(world: World, *names: str) -> None:
    for name in names or world.preprocessors:
        for kind, body in world.preprocessors[name].orders.values():
            world.say(f"{name}: {said(kind, body)}")
