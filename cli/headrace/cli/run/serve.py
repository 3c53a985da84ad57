"""Runs a service's coroutine as a process: logs, signals, a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
from collections.abc import Coroutine
from typing import Any

from headrace.observability import tracing
from headrace.observability.logs import configure_logging


def run_service(name: str, service: Coroutine[Any, Any, None], log_format: str) -> int:
    """Run until SIGINT or SIGTERM, which cancel the coroutine: it then cleans up and the process exits with 0.

    A SIGINT that was ignored when the process started stays so: a shell does that for what it runs in the background, which
    the Ctrl-C of its terminal is not meant for.

    `log_format`: as of `configure_logging`. Raises UserError where logs or traces are not configured as they can be.
    """

    async def supervised() -> None:
        task = asyncio.ensure_future(service)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with contextlib.closing(service):  # it may never be begun
        configure_logging(name, log_format)
        with tracing.exported(name):
            gc.freeze()  # what the imports made stays: a full collection would look through it all, a tenth of a second long
            asyncio.run(supervised())
    return 0
