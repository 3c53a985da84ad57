"""A process that forks others: what takes a process seconds to import it has imported once."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from headrace.child_process import with_parent_death_signal

START_TIMEOUT_S = 180.0  # the first start after a change compiles the planner


class Nursery:
    """Runs a module that calls `tests.nursery.forking.serve`; each order that it is given becomes a process."""

    def __init__(self, module: str, log: Path) -> None:
        """log: for what the nursery itself writes to stderr."""
        with log.open("ab") as errors:
            self._popen = subprocess.Popen(
                with_parent_death_signal([sys.executable, "-m", module], signal.SIGKILL),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
                start_new_session=True,
            )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._begin(self._popen.stdin, self._popen.stdout)

    def _begin(self, orders: IO[str], answers: IO[str]) -> None:
        self._orders = orders
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._has_ended = False
        self._hearing = threading.Thread(target=self._hear, args=(answers,), daemon=True)
        self._hearing.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def _hear(self, answers: IO[str]) -> None:
        with answers, contextlib.suppress(ConnectionResetError):  # of a lent one that was killed
            for line in answers:
                message = json.loads(line)
                with self._changed:
                    if "number" in message:
                        self._pids[message["number"]] = message["pid"]
                        self._codes.pop(message["pid"], None)  # of another process, long ago
                    else:
                        self._codes[message["pid"]] = message["code"]
                    self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def fork(self, **order: Any) -> int:
        """Its process's id. order: what the module's function takes, all of it JSON. Raises TimeoutError."""
        number = next(self._numbers)
        with self._changed:
            with contextlib.suppress(BrokenPipeError):  # it has ended, as is seen below
                self._orders.write(json.dumps(order | {"number": number}) + "\n")
            self._changed.wait_for(lambda: number in self._pids or self._has_ended, START_TIMEOUT_S)
            if number not in self._pids:
                raise TimeoutError(f"nothing was forked, as the nursery {'has ended' if self._has_ended else 'is busy'}")
            return self._pids[number]

    def code(self, pid: int, timeout_s: float = 0.0) -> int | None:
        """The exit code, minus a signal; None while the process runs, which is waited for so long.

        With the nursery all that it has forked is killed.
        """
        with self._changed:
            self._changed.wait_for(lambda: pid in self._codes or self._has_ended, timeout_s)
            return self._codes.get(pid, -signal.SIGKILL if self._has_ended else None)

    def close(self) -> None:
        """All that it has forked ends with it."""
        with contextlib.suppress(BrokenPipeError):  # what an ended one has not read
            self._orders.close()
        self._popen.kill()
        self._popen.wait()


class LentNursery(Nursery):
    """A fork of the suite's mother, which has imported for all."""

    def __init__(self, address: str) -> None:
        """address: the mother's socket. Raises OSError if nobody is there."""
        self._connection = socket.socket(socket.AF_UNIX)
        try:
            self._connection.connect(address)
        except OSError:
            self._connection.close()
            raise
        orders = self._connection.makefile("w")
        orders.reconfigure(line_buffering=True)
        self._begin(orders, self._connection.makefile("r"))

    @property
    def pid(self) -> int:
        raise NotImplementedError("it is known to its mother alone")

    def close(self) -> None:
        """All that it has forked ends with it."""
        with contextlib.suppress(OSError):  # it has ended
            self._connection.shutdown(socket.SHUT_WR)
        self._hearing.join()
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()
        self._connection.close()


class Forked:
    """A process of a nursery, with what callers use of a Popen."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self._nursery = nursery

    def poll(self) -> int | None:
        return self._nursery.code(self.pid)

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, sent: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, which the nursery has not said yet
                os.kill(self.pid, sent)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + (timeout or 0.0)
        while (code := self._nursery.code(self.pid, 1.0 if timeout is None else deadline - time.monotonic())) is None:
            if timeout is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return code
