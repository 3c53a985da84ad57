"""Runs a service's coroutine as a process: logs, signals, a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
from collections.abc import Coroutine
from typing import Any

from headrace.telemetry import configure_logging


def run_service(name: str, service: Coroutine[Any, Any, None]) -> int:
    """Run until SIGINT or SIGTERM, which cancel the coroutine: it then cleans up and the process exits with 0."""
    configure_logging(name)
    gc.freeze()  # what the imports made stays: each full collection would look through all of it, a tenth of a second long

    async def supervised() -> None:
        task = asyncio.ensure_future(service)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(supervised())
    return 0
