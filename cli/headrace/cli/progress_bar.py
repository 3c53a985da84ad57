"""Progress of a command on standard error: a bar on a terminal, elsewhere a line now and then. Standard output is left alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

PLAIN_INTERVAL_S = 10.0  # between lines where standard error is no terminal


class ProgressBar:
    """Shows how far one task after the other is, while it is entered as a context."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        is_log = not self._console.is_terminal
        self._progress = Progress(*columns, console=self._console, transient=True, redirect_stdout=False, disable=is_log)
        self._what, self._done, self._total = "", 0, 0
        self._last_line_s = time.monotonic()

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def begin(self, what: str, total: int) -> None:
        """Start counting a new task, `what`, of `total` items."""
        for task in self._progress.task_ids:
            self._progress.remove_task(task)
        self._progress.add_task(what, total=total)
        self._what, self._done, self._total = what, 0, total

    def advance(self, count: int = 1) -> None:
        """Count `count` more items as done."""
        self._done += count
        for task in self._progress.task_ids:
            self._progress.update(task, completed=self._done)
        now_s = time.monotonic()
        if self._progress.disable and now_s - self._last_line_s >= PLAIN_INTERVAL_S:
            self._last_line_s = now_s
            self._console.print(f"{self._what}: {self._done:,} of {self._total:,}", markup=False, highlight=False)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show during the block that a task goes on of which nobody knows how long it takes, and for how long it has."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True, redirect_stdout=False) as progress:
            progress.add_task(what, total=None)
            yield
        return
    with told_every(
        PLAIN_INTERVAL_S, lambda past_s: console.print(f"{what}: {past_s:.0f} s so far", markup=False, highlight=False)
    ):
        yield


@contextmanager
def told_every(interval_s: float, tell: Callable[[float], object]) -> Iterator[None]:
    """Call `tell` during the block, every `interval_s` and from a thread of its own, with the seconds since the block began."""
    began_s, ended = time.monotonic(), threading.Event()

    def tell_on() -> None:
        while not ended.wait(interval_s):
            tell(time.monotonic() - began_s)

    teller = threading.Thread(target=tell_on, name="progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
