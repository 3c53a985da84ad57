"""Loading of a planner whose kernels numba may have to compile first, which whoever waits for it is told."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from numba.core.event import install_recorder

log = logging.getLogger(__name__)

CACHED_S = 5.0  # enough to load a planner that is compiled already, even on a busy machine
BETWEEN_S = 10.0


async def compiled(warm_up: Callable[[], None], cached_s: float = CACHED_S, between_s: float = BETWEEN_S) -> None:
    """Run `warm_up`, which calls the kernels, in a thread of its own.

    Where it takes longer than `cached_s`, log that it compiles, and from then on every `between_s` how far it is.
    """
    began_s = time.monotonic()
    with install_recorder("numba:compile") as recorder:  # a function that is in no cache has two events
        warm = asyncio.create_task(asyncio.to_thread(warm_up))
        ready, _ = await asyncio.wait({warm}, timeout=cached_s)
        if not ready:
            log.info("compiling the planner: a minute or two on a free core, once and after a change")
        while not ready:
            ready, _ = await asyncio.wait({warm}, timeout=between_s)
            if not ready:
                count = len(recorder.buffer) // 2
                log.info("compiling the planner: %d functions so far, in %.0f s", count, time.monotonic() - began_s)
        await warm
