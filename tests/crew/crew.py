"""The process that has collected the tests: it forks a crew, deals files out to it, and hears what becomes of their tests."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.crew.crew_member import be_a_member
from tests.crew.dealing import Deck, TestFile

LOOK_S = 1.0
"""So often it is looked whether a member has died."""
GRACE_S = 10.0
"""So long members may take to tear down what they have set up, where the run is broken off."""
BEGUN_ANEW = {"jemalloc_bg_thd"}
"""Threads of libraries that begin them in a fork, too: of pyarrow's allocator."""


@dataclass(slots=True)
class Member:
    """A fork, as the other process sees it."""

    number: int
    pid: int
    ears: socket.socket
    said: bytes = b""
    """The beginning of a message."""
    room: str = ""
    tests: list[int] = field(default_factory=list)
    """Dealt to it and not begun."""
    running: int | None = None
    is_done: bool = False
    """Whether it has said that it ends."""


class Crew:
    """Forks of this process, which must have no threads: a fork has only the one that forks."""

    def __init__(self, session: pytest.Session, deck: Deck) -> None:
        self._session = session
        self._deck = deck
        self._members: list[Member] = []
        self._num_hired = 0

    def run(self, count: int) -> None:
        """Run all tests in so many processes. Raises UsageError where there are threads, and what pytest's own loop raises."""
        if threads := _threads():
            raise pytest.UsageError(f"what was collected has begun threads, so that it cannot be forked: {', '.join(threads)}")
        try:
            for _ in range(count):
                self._hire()
            while self._members:
                self._listen()
        finally:
            self._dismiss()

    def _hire(self) -> None:
        self._num_hired += 1
        ears, mouth = socket.socketpair()
        pid = os.fork()
        if not pid:
            for other in self._members:
                other.ears.close()
            ears.close()
            be_a_member(self._session, self._num_hired, mouth)
        mouth.close()
        ears.setblocking(False)
        self._members.append(Member(number=self._num_hired, pid=pid, ears=ears))

    def _listen(self) -> None:
        select.select([member.ears for member in self._members], [], [], LOOK_S)
        for member in [*self._members]:
            pid, status = os.waitpid(member.pid, os.WNOHANG)
            if pid:
                self._members.remove(member)
            for message in _heard(member):
                self._hear(member, **message)
            if pid:
                member.ears.close()
                self._part(member, os.waitstatus_to_exitcode(status))

    def _hear(self, member: Member, kind: str, **said: Any) -> None:
        hook = self._session.config.hook
        if kind == "idle":
            file = self._deck.take(member.room)
            member.room, member.tests = (file.room, [*file.tests]) if file else ("", [])
            member.ears.sendall(json.dumps(member.tests).encode() + b"\n")
        elif kind == "begin":
            member.running = said["test"]
            member.tests.remove(said["test"])
        elif kind == "done":
            member.is_done = True
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=self._session.config, data=said["data"])
            if isinstance(report.longrepr, list):  # file, line and reason of a skipped one
                report.longrepr = tuple(report.longrepr)
            hook.pytest_runtest_logreport(report=report)
        else:
            getattr(hook, f"pytest_runtest_{kind}")(**said)
        self._heed_stops()

    def _part(self, member: Member, code: int) -> None:
        """A member has ended. What it was running has failed, if it did not say that it would end; another one does the rest."""
        if member.is_done and not code:
            return
        if member.running is None:
            raise RuntimeError(f"process {member.number} of the crew has ended with exit code {code}")
        item = self._session.items[member.running]
        by = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", f"the process that ran it ended with {by}", "call")
        self._session.config.hook.pytest_runtest_logreport(report=report)
        if member.tests:
            self._deck.put_back(TestFile(room=member.room, tests=member.tests, load=len(member.tests)))
        self._heed_stops()
        self._hire()

    def _heed_stops(self) -> None:
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    def _dismiss(self) -> None:
        """End those that still run, as Ctrl-C would."""
        for member in self._members:
            os.kill(member.pid, signal.SIGINT)
        deadline = time.monotonic() + GRACE_S
        for member in self._members:
            while not os.waitpid(member.pid, os.WNOHANG)[0]:
                if time.monotonic() > deadline:
                    os.kill(member.pid, signal.SIGKILL)
                time.sleep(0.02)
            member.ears.close()
        self._members.clear()


def _threads() -> list[str]:
    """The names of this process's threads, but for the first one and for those that a fork gets, too."""
    tasks = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    return [name for task in tasks if (name := (task / "comm").read_text().strip()) not in BEGUN_ANEW]


def _heard(member: Member) -> list[dict[str, Any]]:
    """All messages that have come since the last time."""
    chunks = [member.said]
    try:
        while chunk := member.ears.recv(1 << 16):
            chunks.append(chunk)
    except (BlockingIOError, ConnectionResetError):  # no more yet, or ever
        pass
    *lines, member.said = b"".join(chunks).split(b"\n")
    return [json.loads(line) for line in lines]
