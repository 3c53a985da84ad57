"""nodes NUMBER [failures=1] [microbatches=8] [on_loss=rebuild]: what the nodes that join from now on agree on.

Pipelines form when NUMBER of nodes have joined, of which `failures` may be lost at once. A pipeline needs two nodes or more.
"""

from __future__ import annotations

from tests.golden.scripted_node import nodes_spec
from tests.golden.world import World


async def run(world: World, number: int, *, failures: int = 1, microbatches: int = 8, on_loss: str = "rebuild") -> None:
    world.nodes_spec = nodes_spec(number, failures, microbatches, on_loss)
