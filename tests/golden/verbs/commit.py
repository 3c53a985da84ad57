"""commit RANK STEP [loss=nan] [wait=0]: a rank commits a step, in a second of which it waited 0.1 s for data.

`wait`: 1 if the answer is to wait for the other ranks.
"""

from __future__ import annotations

import math

from headrace.v1.sessions_pb2 import CommitRequest
from tests.golden.world import World


async def run(world: World, rank: int, step: int, *, loss: float = math.nan, wait: int = 0) -> None:
    committing = world.ranks[rank]
    request = CommitRequest(step=step, loss=loss, wait=bool(wait), step_s=1.0, data_wait_s=0.1)
    await world.call(committing.who, committing.commit(request))
