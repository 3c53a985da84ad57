"""The thread on which all calls to UCX happen, so that none of them needs a lock.

While idle, it sleeps until UCX wakes it through a file descriptor, or another thread through a second one. While there is
something to transfer, it stays in UCX without the interpreter lock.

A forked child has no such thread and must leave UCX alone: calls raise UcxError there. It should end by `os._exit`, as the
children of multiprocessing do, because it shares the sockets with its parent. Spawned processes and subprocesses have no such
limits.
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

_IDLE_S = 1.0  # longest sleep: not every event of every transport reaches the descriptor
_CLOSING_S = 5.0  # how long operations may take to end after their connections were closed by force

Attempt = Callable[[], bool]
"""A function that is called each time something may have happened, until it returns True."""


class UcxLoop:
    """A UCX worker and the thread that drives it. It is closed at the interpreter's exit at the latest."""

    def __init__(self, name: str) -> None:
        """`name`: name of the thread. Raises UcxError if UCX cannot be used."""
        self.library = ucx_library.load()
        self.worker: Any = self.library.open_worker()
        """The UCXWorker. For use on the thread only; None once the loop has ended."""
        self.at_close: set[Callable[[], None]] = set()
        """Functions to call on the thread when the loop ends, which close what is still open. For use on the thread only."""
        self._pid = os.getpid()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # guards _calls and _closing, and _wake as long as _closing is False
        self._calls: deque[Callable[[], None]] = deque()
        self._closing = False
        self._attempts: list[Attempt] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def call(self, function: Callable[[], None]) -> None:
        """Run a function on the thread soon, in the order of the calls. May be called from any thread.

        Raises UcxError if the loop has ended or this process was forked from the one that opened it.
        """
        if os.getpid() != self._pid:
            raise UcxError("UCX was opened before this process was forked, and works in its parent only")
        with self._lock:
            if self._closing:
                raise UcxError("UCX is closed")
            self._calls.append(function)
            os.eventfd_write(self._wake, 1)

    def until(self, attempt: Attempt) -> None:
        """Call `attempt` each time something may have happened, until it returns True. For use on the thread only."""
        self._attempts.append(attempt)

    def close(self) -> None:
        """End the connections and the thread, and wait for that. May be called from any other thread, and more than once.

        Does nothing in a forked child.
        """
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
        """Run waiting calls, progress UCX and try all attempts once. Return whether that may have enabled further work."""
        num_calls = self._run_calls()
        self.worker.progress()
        num_attempts = len(self._attempts)
        attempts, self._attempts = self._attempts, []
        open_ones = [attempt for attempt in attempts if not attempt()]
        self._attempts = open_ones + self._attempts  # attempts added meanwhile come last
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
            return  # UCX woke the thread, not another thread

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
