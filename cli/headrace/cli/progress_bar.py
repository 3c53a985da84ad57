"""Progress of a command on standard error: a bar on a terminal, elsewhere a line every two seconds."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_INTERVAL_S = 2.0  # between lines where standard error is no terminal


class ProgressBar:
    """Shows how far one task after the other is, while it is entered as a context."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
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

    def advance(self, count: int) -> None:
        """Count `count` more items as done."""
        self._done += count
        for task in self._progress.task_ids:
            self._progress.update(task, completed=self._done)
        now_s = time.monotonic()
        if self._progress.disable and now_s - self._last_line_s >= PLAIN_INTERVAL_S:
            self._last_line_s = now_s
            self._console.print(f"{self._what}: {self._done:,} of {self._total:,}", markup=False, highlight=False)
