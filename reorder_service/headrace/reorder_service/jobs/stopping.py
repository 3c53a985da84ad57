"""Stopping a task for certain."""

from __future__ import annotations

import asyncio
from typing import Any


async def stop_task(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task, if there is one, again and again until it has ended; its errors are dropped.

    Once is not enough: the store's client may swallow a cancellation, as `asyncio.wait_for` does before Python 3.12.
    """
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=0.1)
    if task is not None and not task.cancelled():
        task.exception()  # keeps asyncio from logging that the error was never retrieved
