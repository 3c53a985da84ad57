"""restart: the reorder service ends, and another one takes over its store. Preprocessors and nodes connect to it at once."""

from __future__ import annotations

from tests.golden.world import World


async def run(world: World) -> None:
    await world.stop()
    await world.settle_clients()
    await world.start()
    for preprocessor in world.preprocessors.values():
        preprocessor.connect()
    for node in world.nodes.values():
        if not node.has_ended:
            node.join(node.snapshot.generation)
