"""Helpers for asyncio: background tasks that end with the block that started them, and blocking work in threads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

_T = TypeVar("_T")


class Start(Protocol):
    """A function that runs a coroutine as a background task, which ends with the block of `cancelled_at_exit`."""

    def __call__(self, coroutine: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]: ...


@contextlib.asynccontextmanager
async def cancelled_at_exit() -> AsyncIterator[Start]:
    """Yield a function that starts background tasks; they are cancelled at the end of the block, and an error in one ends it."""
    tasks: set[asyncio.Task[Any]] = set()
    async with asyncio.TaskGroup() as group:

        def start(coroutine: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
            task = group.create_task(coroutine)
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            return task

        try:
            yield start
        finally:
            for task in tasks:
                task.cancel()


async def in_thread(pool: ThreadPoolExecutor, work: Callable[..., _T], *args: Any) -> _T:
    """Call `work(*args)` in a thread of the pool; return or raise what it does."""
    return await asyncio.get_running_loop().run_in_executor(pool, work, *args)
