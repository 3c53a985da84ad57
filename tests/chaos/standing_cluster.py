"""A cluster of processes that faults strike: how it begins and ends, and what is asked of it."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headrace import rpc
from headrace.jobs_client import JobsClient
from headrace.ledger import LedgerEntry
from headrace.preprocessor.payload.arena import remove_stale
from headrace.spec import JobSpec
from tests.chaos.processes import Standing

COUNT = 2  # of reorder services and of preprocessors
START_TIMEOUT_S = 180.0  # the first start after a change compiles the planner
WHOLE_TIMEOUT_S = 100.0
STOP_TIMEOUT_S = 2.0
POLL_S = 0.02


class StandingCluster(ABC):
    """Nothing of it is left at the end of a `with` block, but the logs in a folder that was named."""

    endpoint: str
    """Of all reorder services."""
    _endpoints: list[str]

    def __init__(self, keep: Path | None = None) -> None:
        self._keep = keep
        self.processes: list[Standing] = []
        """All of the below."""
        self.reorders: list[Standing] = []
        self.preprocessors: list[Standing] = []

    def __enter__(self) -> Self:
        self._former = signal.signal(signal.SIGTERM, _interrupt)
        self.folder = self._keep or Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    @abstractmethod
    def _start(self) -> None: ...

    def _end(self) -> None:
        interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave anybody behind
        for process in self.processes:
            process.signal(signal.SIGCONT)
            process.signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while time.monotonic() < deadline and any(process.popen.poll() is None for process in self.processes):
            time.sleep(POLL_S)  # polls real processes
        for process in self.processes:
            process.kill()
        remove_stale()
        if self._keep is None:
            shutil.rmtree(self.folder, ignore_errors=True)
        signal.signal(signal.SIGINT, interrupted)
        signal.signal(signal.SIGTERM, self._former)

    def _standing(self, name: str, command: list[str], **options: Any) -> Standing:
        self.processes.append(Standing(name, command, self.folder / f"{name}.log", **options))
        return self.processes[-1]

    def _headrace(self, name: str, *arguments: str) -> Standing:
        return self._standing(name, [sys.executable, "-u", "-m", "headrace.cli", *arguments])

    def submit(self, spec: JobSpec) -> str:
        with JobsClient(self.endpoint) as client:
            return client.submit(spec)

    def ledger(self, job: str) -> list[LedgerEntry]:
        with JobsClient(self.endpoint) as client:
            return list(client.ledger(job))

    def is_led(self) -> bool:
        return any(rpc.is_serving(endpoint, "headrace.v1.Jobs") for endpoint in self._endpoints)

    def await_(self, holds: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {timeout_s:.0f} s")
            time.sleep(POLL_S)  # polls real processes


def _interrupt(_number: int, _frame: Any) -> None:
    raise KeyboardInterrupt
