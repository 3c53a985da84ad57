"""How far this process has come, as its main thread says and shows it, for the process that has to tell a hang from long work."""

from __future__ import annotations

import linecache
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressReport:
    """What one process reports of itself. All fields are JSON values."""

    place: str
    """What the process is in the job, such as "llm 0.1"; may be empty."""
    step: int
    """Index of its present step; -1 before the first one."""
    doing: str
    """What it began last, such as an action of its schedule."""
    at: str
    """File, line and function of Headrace's that its main thread is in."""
    waits: bool
    """Whether the main thread seems to wait for something there, rather than to compute."""
    idle_s: float
    """Seconds since the last sign of progress; 0 while `excuse` is not empty."""
    excuse: str
    """What takes as long as it takes, and is not to be taken for a hang; empty if nothing does."""

    def __str__(self) -> str:
        step = f"step {self.step}, " if self.step >= 0 else ""
        return f"{step}{self.excuse or self.doing}{f', {self.at}' if self.at else ''}"


class Progress:
    """The progress of this process. Any thread may note some. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.place = ""
        self._step = -1
        self._doing: object = "starts"
        self._moved_s = clock()
        self._excuse = "starts"

    def begin_step(self, step: int) -> None:
        """Note that a step begins. Before the first one, the process is excused: starting may take long."""
        self._step = step
        self.begin("begins")

    def begin(self, what: object) -> None:
        """Note that something begins. `what`: turned into a string if it is asked for."""
        self._doing, self._excuse = what, ""
        self.move()

    def move(self) -> None:
        """Note a sign of progress, also that of a wait which is known not to be for another rank."""
        self._moved_s = self._clock()

    def excuse(self, what: str) -> None:
        """Excuse this process until something begins: it does or waits for `what`, which may take long."""
        self._excuse = what

    @contextmanager
    def excused(self, what: str) -> Iterator[None]:
        """Excuse this process for the block."""
        former, self._excuse = self._excuse, what
        try:
            yield
        finally:
            self._excuse = former
            self.move()

    def report(self) -> ProgressReport:
        """Return the present report. May be called by any thread."""
        excuse, (at, waits) = self._excuse, _whereabouts()
        return ProgressReport(
            place=self.place,
            step=self._step,
            doing=str(self._doing),
            at=at,
            waits=waits,
            idle_s=0.0 if excuse else self._clock() - self._moved_s,
            excuse=excuse,
        )


PROGRESS = Progress()
"""That of this process."""


def _whereabouts() -> tuple[str, bool]:
    """Return file, line and function of the innermost frame of Headrace's on the main thread, and whether it waits there.

    A thread that is inside of a call into C shows the line of that call.
    """
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    waits = False
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)
        waits = waits or module.startswith(("torch.distributed", "threading")) or "wait(" in line
        if module.startswith("headrace."):
            return f"{module.removeprefix('headrace.')}:{frame.f_lineno} {frame.f_code.co_name}", waits
        frame = frame.f_back
    return "", waits
