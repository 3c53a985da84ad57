"""An event loop in virtual time, shared by simulated processes that can be paused and killed.

Time stands still while a callback runs, and jumps to the next timer when nothing is left to do. A process is a context: all
callbacks of its tasks, timers and futures run in contexts that name it. Those of a paused process wait until it resumes, and
those of a killed one never run, so that not even its `finally` blocks do anything, as after SIGKILL or SIGSTOP.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import heapq
import itertools
import resource
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from tests.simulation.replacing import replaced

THREAD_S = (0.0, 0.004)  # how long work in a thread takes: drawn from this range
MOST_CALLBACKS = 3_000_000  # of a run; more are no progress
LOOK_CALLBACKS = 10_000  # after which a loop looks whether it goes on
COLLECT_CALLBACKS = 10 * LOOK_CALLBACKS  # after which it has Python collect garbage; most runs end before
MOST_BYTES = 2 << 30  # that memory may grow by in a run

PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)
"""The simulated process that the running code belongs to; None: the simulation itself."""


class StalledError(AssertionError):
    """Raised when nothing is left to do and no timer is set, or when the simulation does not come to an end."""


class Process:
    """A simulated process: whether it runs, and its context. Its monotonic clock began `booted_s` before the simulation's."""

    def __init__(self, name: str, loop: VirtualLoop, booted_s: float = 0.0) -> None:
        self.name = name
        self.loop = loop
        self.booted_s = booted_s
        self.is_alive = True
        self.is_paused = False
        self.held: list[_Handle] = []
        """Callbacks that were due while it was paused."""
        self.left: list[asyncio.Task[Any]] = []
        """Tasks that were pending when it was killed: if they were dropped, their `finally` blocks would run."""
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine as a task of this process."""
        return self.loop.create_task(coroutine, context=self.context.copy())

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        held, self.held = self.held, []
        self.loop.ready.extend(held)

    def kill(self) -> None:
        self.is_alive = False
        self.held.clear()
        self.left = self.loop.pending_tasks()


class _Task(asyncio.Task[Any]):
    """A task whose hash does not depend on its address: asyncio keeps tasks in sets, and walks through them."""

    _numbers = itertools.count()

    def __init__(self, *args: Any, **options: Any) -> None:
        self._number = next(self._numbers)
        super().__init__(*args, **options)

    def __hash__(self) -> int:
        return self._number


def _new_task(loop: Any, coroutine: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
    task = _Task(coroutine, loop=loop, **options)
    loop.known.append(weakref.ref(task))
    return task


class _Handle:
    """A callback that is due, now or later, with nothing of asyncio.Handle but this: each simulated second has a hundred."""

    __slots__ = ("args", "callback", "context", "is_cancelled")

    def __init__(self, callback: Callable[..., Any], args: tuple[Any, ...], context: contextvars.Context | None) -> None:
        self.context = contextvars.copy_context() if context is None else context
        self.callback, self.args, self.is_cancelled = callback, args, False

    def cancel(self) -> None:
        self.is_cancelled, self.callback, self.args = True, _nothing, ()


def _nothing() -> None:
    """What a callback that was cancelled does."""


class _Sleep:
    """What asyncio.sleep returns: a timer that wakes the task that awaits it, without a future in between."""

    __slots__ = ("_asyncio_future_blocking", "_context", "_delay_s", "_is_cancelled", "_loop", "_timer", "_wake")

    def __init__(self, loop: VirtualLoop, delay_s: float) -> None:
        self._loop, self._delay_s = loop, delay_s
        self._is_cancelled = False

    def __await__(self) -> Iterator[_Sleep]:
        self._asyncio_future_blocking = True
        yield self

    def get_loop(self) -> VirtualLoop:
        return self._loop

    def add_done_callback(self, wake: Callable[[_Sleep], None], *, context: contextvars.Context) -> None:
        """Begin: the task does this as soon as it waits."""
        self._wake, self._context = wake, context
        if self._delay_s > 0:
            self._timer = self._loop.call_later(self._delay_s, wake, self, context=context)
        else:
            self._timer = self._loop.call_soon(wake, self, context=context)

    def cancel(self, msg: Any = None) -> bool:
        if self._is_cancelled:
            return False
        self._is_cancelled = True
        self._timer.cancel()
        self._loop.call_soon(self._wake, self, context=self._context)
        return True

    def result(self) -> None:
        del self._timer  # which refers to this
        if self._is_cancelled:
            raise asyncio.CancelledError


class VirtualLoop(asyncio.BaseEventLoop):
    """The loop. `random`: for the time that threads take."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random
        self._timers: list[tuple[float, int, _Handle]] = []
        self._numbers = itertools.count()
        self.now_s = 0.0
        """The simulation's clock, for those who read it often."""
        self.ready: deque[_Handle] = deque()
        """The callbacks that run next, in order."""
        self._first_bytes = _resident_bytes()
        self.num_callbacks = 0
        """Callbacks that had run when they were last counted, which is every LOOK_CALLBACKS and whenever the loop stops."""
        self.errors: list[tuple[str, BaseException | None]] = []
        """Exceptions that nobody has caught, each with what asyncio says of it."""
        self.known: list[weakref.ref[asyncio.Task[Any]]] = []
        """The tasks that were made, in order, and some of them are over."""
        self.create_future = partial(asyncio.Future, loop=self)  # type: ignore[method-assign]
        self.set_task_factory(_new_task)
        self.set_exception_handler(self._note_error)

    def time(self) -> float:
        return self.now_s

    def pending_tasks(self) -> list[asyncio.Task[Any]]:
        """All tasks that are not over, in the order in which they were made."""
        found = [(ref, task) for ref in self.known if (task := ref()) is not None and not task.done()]
        self.known = [ref for ref, _ in found]
        return [task for _, task in found]

    def _note_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.errors.append((str(context["message"]), context.get("exception")))

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> _Handle:
        timer = _Handle(callback, args, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> _Handle:
        timer = _Handle(callback, args, context)
        heapq.heappush(self._timers, (self.now_s + delay, next(self._numbers), timer))
        return timer

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None) -> _Handle:
        handle = _Handle(callback, args, context)
        self.ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def run_in_executor(self, executor: Any, work: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Do the work at one moment a little later, in place of a thread."""
        future = self.create_future()

        def do() -> None:
            if future.cancelled():
                return
            try:
                result = work(*args)
            except BaseException as err:
                future.set_exception(err)
            else:
                future.set_result(result)

        self.call_later(self._random.uniform(*THREAD_S), do)
        return future

    def _run_once(self) -> None:
        """Run what is due, and then let time pass to the next timer, again and again until the loop is stopped.

        Meanwhile asyncio need not look up which loop runs, for which it would ask the kernel for the process's id each time.
        """
        with ExitStack() as stack:
            for module, name, known in (
                (asyncio.events, "_get_running_loop", lambda: self),
                (asyncio.events, "get_running_loop", lambda: self),
                (asyncio, "get_running_loop", lambda: self),
                (asyncio, "sleep", partial(_Sleep, self)),
            ):
                stack.enter_context(replaced(module, name, known))
            self._run_until_stopped()

    def _run_until_stopped(self) -> None:
        ready, timers, left = self.ready, self._timers, LOOK_CALLBACKS
        while not self._stopping:
            if ready:
                handle = ready.popleft()
            elif timers:
                when_s, _, handle = heapq.heappop(timers)
                if when_s > self.now_s and not handle.is_cancelled:
                    self.now_s = when_s
            else:
                raise StalledError("nothing is left to do")
            if handle.is_cancelled:
                continue
            process = handle.context.get(PROCESS)
            if process is None or (process.is_alive and not process.is_paused):
                left -= 1
                try:
                    handle.context.run(handle.callback, *handle.args)
                except Exception as err:
                    self.call_exception_handler({"message": f"Exception in callback {handle.callback}", "exception": err})
                if not left:
                    left = LOOK_CALLBACKS
                    self.num_callbacks += LOOK_CALLBACKS
                    self._check_bounds()
            elif process.is_alive:
                process.held.append(handle)
        self.num_callbacks += LOOK_CALLBACKS - left

    def _check_bounds(self) -> None:
        """Raise StalledError where the loop has run too much or holds too much, as one that is stuck in one moment does."""
        if self.num_callbacks > MOST_CALLBACKS:
            raise StalledError(f"{self.now_s:.3f} s: no end after {self.num_callbacks} callbacks")
        if not self.num_callbacks % COLLECT_CALLBACKS:
            gc.collect()  # at the same moments of every run: finalizers may do something
            if (held_bytes := _resident_bytes() - self._first_bytes) > MOST_BYTES:
                raise StalledError(f"{self.now_s:.3f} s: the simulation holds {held_bytes >> 20} MiB more than when it began")


def _resident_bytes() -> int:
    """Bytes of memory that this process has at present."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
