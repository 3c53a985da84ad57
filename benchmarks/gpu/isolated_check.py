"""A check in a process of its own: one that crashes, hangs or runs out of memory becomes a row, and the others go on."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

from benchmarks.gpu.target import Target
from benchmarks.report import Row, Section, failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What one module of this package measures."""

    measure: Callable[[Target], Iterator[Row]]
    """The module's function; it runs in another process, which imports the module."""
    title: str
    budget_s: float
    """Seconds after which the check is ended; the rows until then are kept."""

    @property
    def name(self) -> str:
        """The module's name."""
        return self.measure.__module__.rpartition(".")[2]


class CheckProcesses:
    """Starts a process for each check, from one that has imported what all checks need but has not touched the device."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["benchmarks.gpu.stage_alone"])

    def run(self, check: Check, target: Target) -> Section:
        """Run a check to its end, or to the end of its time."""
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_serve, args=(check.measure, target, theirs), name=check.name)
        process.start()
        theirs.close()
        rows, deadline = [], time.monotonic() + check.budget_s
        reason: str | None = f"not done within {check.budget_s:g} s"
        try:
            for row in _received(ours, deadline):
                if isinstance(row, Row):
                    rows.append(row)
                else:
                    reason = row
        except EOFError:
            process.join(timeout=10)
            reason = f"its process ended with {_in_words(process.exitcode)}"
        finally:
            _end(process)
        if reason is not None:
            rows.append(failed(reason))
        return Section(title=target.title(check.title), rows=rows)


def skipped(name: str, reason: str) -> Row:
    """Return the row of something that this machine cannot show; it has no goal."""
    return Row(name=name, value=0, unit="runs", detail=f"skipped: {reason}")


def _received(pipe: Connection, deadline: float) -> Iterator[Row | str | None]:
    """Yield rows, and at the end the reason of a failure or None. Raises EOFError if the other end is gone before."""
    while pipe.poll(max(0.0, deadline - time.monotonic())):
        row = pipe.recv()
        yield row
        if not isinstance(row, Row):
            return


def _serve(measure: Callable[[Target], Iterator[Row]], target: Target, pipe: Connection) -> None:
    os.setsid()  # so that what the check starts can be ended with it
    try:
        for row in measure(target):
            pipe.send(row)
    except Exception as err:
        pipe.send(f"{type(err).__name__}: {err}")
    else:
        pipe.send(None)


def _end(process: multiprocessing.process.BaseProcess) -> None:
    """End the check's process and all that it has started."""
    process.join(timeout=5 if process.exitcode is not None else 0.5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.kill()  # it may not have come as far as to lead a group
    process.join()


def _in_words(exit_code: int | None) -> str:
    return f"signal {signal.Signals(-exit_code).name}" if exit_code is not None and exit_code < 0 else f"exit code {exit_code}"
