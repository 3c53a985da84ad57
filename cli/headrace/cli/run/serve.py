"""Run a service's coroutine as a process: logs, signals, a clean end."""

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
    """Run `service` until SIGINT or SIGTERM, which cancel it; it then cleans up and the process exits with 0.

    A SIGINT that was ignored when the process started stays ignored. A shell does that for background processes, which the Ctrl-C
    of its terminal is not meant for.

    `log_format`: see `configure_logging`. Raises UserError if the settings of logs or traces are invalid.
    """

    async def supervised() -> None:
        task = asyncio.ensure_future(service)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with contextlib.closing(service):  # `service` may never be started
        configure_logging(name, log_format)
        with tracing.exported(name):
            gc.freeze()  # leaves out of full collections what the imports made: looking through it takes a tenth of a second
            asyncio.run(supervised())
    return 0
