"""Blocking code in the event loop: a function runs as a fiber, which other code may run beside whenever it waits.

`Threading` stands in for the module `threading` in the trainer's client, so that the client's own code runs unchanged.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from greenlet import getcurrent, greenlet

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


class Threading:
    """What the trainer's client uses of the module `threading`."""

    Lock = _Lock
    Event = _Event
