"""Time for a script: it stands still until the script passes it, and everything else happens in between, in one thread."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest import mock

BEGIN_S = 1000.0


class ScriptLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own. Sockets are served as ever, but a timer is due only once `now_s` was moved there."""

    def __init__(self) -> None:
        self.now_s = BEGIN_S
        super().__init__()
        self.set_default_executor(InlineExecutor())

    def time(self) -> float:
        return self.now_s

    async def run_ready(self) -> None:
        """Run everything that can run now, without waiting for a socket or a timer."""
        while self._ready:  # type: ignore[attr-defined]
            await asyncio.sleep(0)

    def next_timer_s(self) -> float:
        """Return the time of the next timer; infinity if there is none."""
        timers = (timer.when() for timer in self._scheduled if not timer.cancelled())  # type: ignore[attr-defined]
        return min(timers, default=float("inf"))


class InlineExecutor(ThreadPoolExecutor):
    """Runs what is meant for a worker thread at once, so that nothing happens at the same time."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as err:
            future.set_exception(err)
        return future


@contextlib.contextmanager
def script_time(loop: ScriptLoop) -> Iterator[None]:
    """Let the clocks of this process that cannot be set back show the time of `loop` meanwhile."""
    with mock.patch.object(time, "monotonic", loop.time), mock.patch.object(time, "perf_counter", loop.time):
        yield
