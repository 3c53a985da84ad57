"""Blocking code in the event loop: a function runs as a fiber, which other code may run beside whenever it waits.

`Threading`, `SimpleQueue` and `Future` stand in for those of the standard library in the trainer's client, so that the
client's own code runs unchanged.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from greenlet import getcurrent, greenlet

from tests.simulation.virtual_loop import PROCESS

_T = TypeVar("_T")


class _Fiber(greenlet):
    """A greenlet that hands what it waits for to the task that drives it."""


async def in_fiber(function: Callable[..., _T], *args: Any) -> _T:
    """Call a function that waits with `wait_for`, and return or raise what it does."""
    fiber = _Fiber(function, getcurrent())
    fiber.gr_context = getcurrent().gr_context
    waits_for = fiber.switch(*args)
    while not fiber.dead:
        try:
            result = await waits_for
        except BaseException as err:
            waits_for = fiber.throw(err)
        else:
            waits_for = fiber.switch(result)
    result_of_function: _T = waits_for
    return result_of_function


def wait_for(awaitable: Awaitable[_T]) -> _T:
    """Wait for an awaitable in a fiber, and return or raise what it does."""
    fiber = getcurrent()
    assert isinstance(fiber, _Fiber), "blocking code runs in a fiber only"
    result: _T = fiber.parent.switch(awaitable)
    return result


def sleep(seconds: float) -> None:
    wait_for(asyncio.sleep(seconds))


class _Lock:
    """threading.Lock between fibers."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    def acquire(self, blocking: bool = True) -> bool:
        while self._is_held:
            if not blocking:
                return False
            self._waiting.append(asyncio.get_running_loop().create_future())
            wait_for(self._waiting[-1])
        self._is_held = True
        return True

    def release(self) -> None:
        self._is_held = False
        if self._waiting:
            self._waiting.popleft().set_result(None)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Event:
    """threading.Event between fibers."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def is_set(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        self._event.set()

    def wait(self, timeout: float | None = None) -> bool:
        async def waiting() -> bool:
            try:
                async with asyncio.timeout(timeout):
                    return await self._event.wait()
            except TimeoutError:
                return False

        return self._event.is_set() or wait_for(waiting())


class _Thread:
    """threading.Thread as a fiber of the process that starts it."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...] = (), **_: Any) -> None:
        self._target, self._args = target, args

    def start(self) -> None:
        process = PROCESS.get()
        assert process is not None
        process.spawn(in_fiber(self._target, *self._args))


class Threading:
    """What the trainer's client uses of the module `threading`."""

    Lock = _Lock
    Event = _Event
    Thread = _Thread


class SimpleQueue(Generic[_T]):
    """queue.SimpleQueue between fibers."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[_T] = asyncio.Queue()
        self.put, self.empty = self._items.put_nowait, self._items.empty

    def get(self) -> _T:
        return wait_for(self._items.get())


class Future(Generic[_T]):
    """concurrent.futures.Future between fibers."""

    def __init__(self) -> None:
        self._future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self.set_result = self._future.set_result

    def set_exception(self, error: Exception) -> None:
        self._future.set_exception(error)
        self._future.exception()  # nobody need ask for it, as with the real one

    def result(self, timeout: float | None = None) -> _T:
        async def waiting() -> _T:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(self._future)

        return wait_for(waiting())
