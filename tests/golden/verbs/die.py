"""die NAME: the process of a preprocessor, a node or a host ends without a word, which closes its stream."""

from __future__ import annotations

from tests.golden.world import World


async def run(world: World, name: str) -> None:
    (world.preprocessors.pop(name, None) or world.hosts.pop(name, None) or world.nodes[name]).end()
