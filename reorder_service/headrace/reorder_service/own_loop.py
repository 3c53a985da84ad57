"""An event loop and a thread of its own for one coroutine, which then goes on while the process's main loop is busy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any


async def run_in_own_loop(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run the coroutine that `work` makes to its end, in a thread of its own, and raise what it raises.

    Where this is cancelled, the coroutine is cancelled, again and again until it has ended (`stop_task` says why), and then this.
    """
    loop = asyncio.new_event_loop()
    task = loop.create_task(work())

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    with contextlib.closing(loop), ThreadPoolExecutor(1) as thread:
        running = asyncio.get_running_loop().run_in_executor(thread, run)
        try:
            await asyncio.shield(running)
        finally:
            while not running.done():
                loop.call_soon_threadsafe(task.cancel)
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({running}, timeout=0.1)
