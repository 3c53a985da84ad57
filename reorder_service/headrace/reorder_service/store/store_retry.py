"""Waiting for a state store that does not answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headrace.errors import UnavailableError
from headrace.observability.logs import pairs

STORE_RETRY_S = 0.5  # pause before a store that does not answer is asked again

log = logging.getLogger(__name__)

_T = TypeVar("_T")


async def retry_while_unavailable(ask: Callable[[], Awaitable[_T]], check: Callable[[], None] = lambda: None, **what: str) -> _T:
    """Await `ask` and return its result, again and again as long as the store does not answer.

    `check`: raises where the store never will. `what`: fields for the log, such as the name of a job.
    """
    while True:
        try:
            return await ask()
        except UnavailableError as err:
            log.warning("waiting for the store %s", pairs(**what, error=err))
        check()
        await asyncio.sleep(STORE_RETRY_S)
