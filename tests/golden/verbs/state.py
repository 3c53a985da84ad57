"""state [KIND ...]: print the state of all there is, or of these kinds of it: service, job, rank, pipelines, node, preprocessor.

The lines are those of `headrace top --plain`. A rate is that since the `state` before.
"""

from __future__ import annotations

from tests.golden.world import World


async def run(world: World, *kinds: str) -> None:
    for line in await world.status_lines():
        if not kinds or line.split()[0] in kinds:
            world.say(line)
