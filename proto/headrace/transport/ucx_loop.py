"""The thread on which everything of UCX happens, so that nothing of it needs a lock.

Idle, it sleeps: UCX wakes it by a file descriptor, other threads by another. Under way, it stays in UCX without the interpreter's
lock as long as there is something to move.

A forked child has no such thread and must leave UCX alone: calls raise UcxError there. It should end by `os._exit`, as the
children of multiprocessing do, for the sockets are its parent's too. Spawned processes and subprocesses are free of this.
"""

from __future__ import annotations

import atexit
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from headrace.transport import ucx_library
from headrace.transport.ucx_library import UcxError

_IDLE_S = 1.0  # looks around at least so often: not every event of every transport reaches the descriptor
_CLOSING_S = 5.0  # for operations to end after their connections were closed by force

Attempt = Callable[[], bool]
"""Tried again each time that something may have happened, until it says True."""


class UcxLoop:
    """One UCX worker and its thread. It is closed at the interpreter's exit at the latest."""

    def __init__(self, name: str) -> None:
        """`name`: of the thread. Raises UcxError where UCX cannot be used."""
        self.library = ucx_library.load()
        self.worker: Any = self.library.open_worker()
        """For calls on the thread only."""
        self.at_close: set[Callable[[], None]] = set()
        """Called on the thread when the loop ends: closes what is open. For use on the thread only."""
        self._pid = os.getpid()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # of _calls and _closing, and of _wake as long as that is False
        self._calls: deque[Callable[[], None]] = deque()
        self._closing = False
        self._attempts: list[Attempt] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def call(self, function: Callable[[], None]) -> None:
        """Run it on the thread, soon and in order. From any thread. Raises UcxError where the loop has ended."""
        if os.getpid() != self._pid:
            raise UcxError("UCX was opened before this process was forked, and works in its parent only")
        with self._lock:
            if self._closing:
                raise UcxError("UCX is closed")
            self._calls.append(function)
            os.eventfd_write(self._wake, 1)

    def until(self, attempt: Attempt) -> None:
        """For use on the thread only."""
        self._attempts.append(attempt)

    def close(self) -> None:
        """End the connections and the thread, and wait for that. From any other thread; more than once does no harm."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if not self._closing:
                self._closing = True
                os.eventfd_write(self._wake, 1)
        self._thread.join()
        atexit.unregister(self.close)

    def _run(self) -> None:
        try:
            waiting = select.poll()
            waiting.register(self.worker.epoll_file_descriptor, select.POLLIN)
            waiting.register(self._wake, select.POLLIN)
            while not self._closing:
                if not self._turn() and self.worker.arm() and waiting.poll(_IDLE_S * 1e3):
                    self._clear_wake()
        finally:
            self._end()

    def _turn(self) -> bool:
        """Whether anything was done that may let more be done."""
        num_calls = self._run_calls()
        self.worker.progress()
        num_attempts = len(self._attempts)
        attempts, self._attempts = self._attempts, []
        open_ones = [attempt for attempt in attempts if not attempt()]
        self._attempts = open_ones + self._attempts  # those that were made meanwhile come last
        return bool(num_calls) or len(open_ones) < num_attempts or len(self._attempts) > len(open_ones)

    def _run_calls(self) -> int:
        with self._lock:
            calls = list(self._calls)
            self._calls.clear()
        for function in calls:
            function()
        return len(calls)

    def _clear_wake(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return  # it was UCX

    def _end(self) -> None:
        with self._lock:
            self._closing = True
        self._run_calls()
        for function in list(self.at_close):
            function()
        deadline = time.monotonic() + _CLOSING_S
        while self._attempts and time.monotonic() < deadline:
            self._turn()
        self._attempts.clear()
        self.worker = None
        os.close(self._wake)
