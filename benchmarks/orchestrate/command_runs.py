"""Commands of `headrace` that a benchmark runs to their ends, one after the other and all within a limit of time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.forecast.live_job import await_end
from benchmarks.timing import progress
from headrace.cli.progress_bar import PLAIN_INTERVAL_S, told_every
from headrace.processes import Process, ProcessGroup


class CommandRuns:
    """Runs commands, whose logs are in a folder, and says on standard error which one, and how far it is."""

    def __init__(self, what: str, folder: Path, longest_s: float) -> None:
        """what: name of the part of the benchmark. longest_s: seconds, from now on, that all commands together may take."""
        self.folder = folder
        self._what, self._longest_s = what, longest_s
        self._ends_s = time.monotonic() + longest_s

    def run(self, name: str, arguments: Sequence[str]) -> str:
        """Run `headrace` with these arguments; return the last line that it printed.

        Raises RuntimeError where it fails, or the time is over.
        """
        left_s = self.left_s()
        progress(f"{self._what}: {name}")
        with ProcessGroup() as group:
            process = group.add(Process(name, list(arguments), self.folder / f"{name}.log", {"OMP_NUM_THREADS": "1"}))
            with told_every(PLAIN_INTERVAL_S, lambda past_s: progress(f"  {past_s:.0f} s: {_said(process)}")):
                await_end([process], left_s)
            return process.last_lines(1)[0]

    def left_s(self) -> float:
        """Return the seconds that are left. Raises RuntimeError where none are."""
        left_s = self._ends_s - time.monotonic()
        if left_s <= 0.0:
            raise RuntimeError(f"not done within {self._longest_s:g} s")
        return left_s


def _said(process: Process) -> str:
    """Return the last line that a process has printed, as much of it as fits a line."""
    return "".join(process.last_lines(1))[:100] or "no word of it yet"
