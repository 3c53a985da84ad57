"""Bringing work to an end for certain: a task is stopped, or goes on to its own end whoever waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from headrace.errors import HeadraceError
from headrace.observability.logs import pairs

log = logging.getLogger(__name__)

_T = TypeVar("_T")


async def stop_task(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task, if there is one, again and again until it has ended; its errors are dropped.

    Once is not enough: the store's client may swallow a cancellation, as `asyncio.wait_for` does before Python 3.12.
    """
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=0.1)
    if task is not None and not task.cancelled():
        task.exception()  # keeps asyncio from logging that the error was never retrieved


async def to_its_end(work: Coroutine[Any, Any, _T]) -> _T:
    """Await `work`, and return its result or raise its error. Where the caller is cancelled, `work` goes on to its end.

    Whoever made a call may be gone before it is answered, and the store and the memory of a job must not be left apart then. An
    error of work that nobody waits for any more is logged.
    """
    task = asyncio.create_task(work, name=getattr(work, "__qualname__", None))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_log_error)
        raise


def _log_error(task: asyncio.Task[Any]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is None:
        return
    what = pairs(work=task.get_name(), error=error)
    if isinstance(error, HeadraceError):
        log.info("failed when nobody waited any more %s", what)
    else:
        log.error("failed when nobody waited any more %s", what, exc_info=error)
