"""Time for a script: it stands still until the script passes it, and everything else happens in between, in one thread."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import selectors
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context
from typing import Any
from unittest import mock

from headrace.reorder_service import leadership

BEGIN_S = 1000.0


class ScriptLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own: a timer is due only once `now_s` was moved there.

    Timers of the same time are due in the order in which they were made. Sockets are served
    when nothing else is left to do, so that the order of events does not depend on how soon the store answers.
    """

    def __init__(self) -> None:
        self.now_s = BEGIN_S
        super().__init__(PatientSelector())
        self.set_default_executor(InlineExecutor())

    def time(self) -> float:
        return self.now_s

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = OrderedTimer(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True
        return timer

    async def run_ready(self) -> None:
        """Run everything that can run now, without waiting for a socket or a timer."""
        while self._ready:  # type: ignore[attr-defined]  # noqa: ASYNC110 - the event loop's own view of itself
            await asyncio.sleep(0)

    def next_timer_s(self) -> float:
        """Return the time of the next timer; infinity if there is none."""
        timers = (timer.when() for timer in self._scheduled if not timer.cancelled())  # type: ignore[attr-defined]
        return min(timers, default=float("inf"))


class OrderedTimer(asyncio.TimerHandle):
    """A timer that stands behind those of the same time that were made before."""

    _numbers = itertools.count()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._number = next(self._numbers)

    def __lt__(self, other: OrderedTimer) -> bool:  # type: ignore[override]
        return (self.when(), self._number) < (other.when(), other._number)


class PatientSelector(selectors.DefaultSelector):
    """Finds nothing unless it may wait, as it may when the event loop has nothing left to do."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return [] if timeout == 0 else super().select(timeout)


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
    """Let the clocks of this process that cannot be set back show the time of `loop` meanwhile, and let no other loop run."""
    with (
        mock.patch.object(time, "monotonic", loop.time),
        mock.patch.object(time, "perf_counter", loop.time),
        mock.patch.object(leadership, "run_in_own_loop", lambda work: work()),
    ):
        yield
