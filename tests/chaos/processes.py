"""Processes that are struck and started again, and what they take of the machine."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from headrace.child_process import with_parent_death_signal
from tests.nursery.nursery import Forked

RETRY_S = 0.3  # pause before a process that has ended by itself is started again: what it needs may be away


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a process takes: memory of its own in KiB (VmRSS without shared memory, which has a budget), descriptors, threads."""

    memory_kib: int
    num_fds: int
    num_threads: int = 0

    @classmethod
    def of(cls, pid: int) -> Self:
        """Of a process now. Raises OSError where it is gone."""
        folder = Path(f"/proc/{pid}")
        found = dict(re.findall(r"(\w+):\s+(\d+)", (folder / "status").read_text()))
        memory_kib = int(found["VmRSS"]) - int(found["RssShmem"])
        return cls(memory_kib=memory_kib, num_fds=len(os.listdir(folder / "fd")), num_threads=int(found["Threads"]))


class Standing:
    """A process that is started again whenever it has ended."""

    def __init__(self, name: str, command: list[str], log: Path, ready: str = " listening on ") -> None:
        """`ready`: what it prints once it works."""
        self.name = name
        self.log = log
        self._command = command
        self._ready = ready
        log.write_bytes(b"")
        self._begin()

    def start(self) -> None:
        """Unless it runs."""
        if self.popen.poll() is not None:
            self._begin()

    def _begin(self) -> None:
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self.popen = self._launch(log)
        self.is_killed = False
        self.rounds = 0
        """That it has lived through."""
        self.baseline: Footprint | None = None
        self._ended_s: float | None = None

    def _launch(self, log: IO[bytes]) -> subprocess.Popen[Any] | Forked:
        command = with_parent_death_signal(self._command, signal.SIGKILL)
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def is_ready(self) -> bool:
        """Whether it runs, and has said that it works."""
        return self.popen.poll() is None and self._was_ready()

    def _was_ready(self) -> bool:
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return self._ready.encode() in log.read()

    def kill(self) -> None:
        """It stays away until `start`."""
        self.is_killed = True
        self.popen.kill()
        self.popen.wait()

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)  # not to one that is gone

    def look_after(self) -> str:
        """Start it again where it has ended by itself. What there is to say of that: nothing where it had not begun to work."""
        if self.is_killed or self.popen.poll() is None:
            return ""
        now_s = time.monotonic()
        if self._ended_s is None:
            self._ended_s = now_s
            if self._was_ready():
                words = self.log.read_text(errors="replace").strip().splitlines()
                return f"{self.name} ended by itself ({self.popen.returncode}): {words[-1] if words else ''}"
        elif now_s > self._ended_s + RETRY_S:
            self.start()
        return ""

    def footprint(self) -> Footprint:
        return Footprint.of(self.popen.pid)


class RankProcess(Standing):
    """A rank (tests.chaos.rank). What it says comes to `heard`, with its number."""

    def __init__(self, number: int, num_ranks: int, endpoint: str, log: Path, heard: queue.Queue[tuple[int, Any]]) -> None:
        self.number = number
        self._heard = heard
        self._job: dict[str, str] | None = None
        super().__init__(f"rank {number}", [sys.executable, "-m", "tests.chaos.rank", endpoint, str(number), str(num_ranks)], log)

    def _launch(self, log: IO[bytes]) -> subprocess.Popen[Any]:
        popen = subprocess.Popen(
            with_parent_death_signal(self._command, signal.SIGKILL),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        threading.Thread(target=self._hear, args=(popen,), daemon=True).start()
        if self._job is not None:
            _write(popen, self._job)
        return popen

    def _hear(self, popen: subprocess.Popen[Any]) -> None:
        assert popen.stdout is not None
        with popen.stdout as lines:
            for line in lines:
                if line.endswith("\n"):  # not what a killed one has half written
                    self._heard.put((self.number, json.loads(line)))

    def _was_ready(self) -> bool:
        return True

    def begin(self, job: str, transport: str) -> None:
        """Consume a job; one that is killed goes on with it."""
        self._job = {"job": job, "transport": transport}
        _write(self.popen, self._job)

    def commit(self) -> None:
        """The step that was fetched last."""
        _write(self.popen, True)

    def end(self) -> None:
        """The job is over."""
        self._job = None

    def kill(self) -> None:
        super().kill()
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.close()


def _write(popen: subprocess.Popen[Any], value: Any) -> None:
    assert popen.stdin is not None
    with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended: whoever looks after it sees that
        popen.stdin.write(json.dumps(value) + "\n")
