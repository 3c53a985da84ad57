"""Whoever waits for a service that takes long to start, as after an installation, is told what it does."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from headrace import processes
from headrace.errors import HeadraceError
from headrace.processes import SILENT_S, Process, ProcessGroup

COMPILES = (
    "echo 'compiling the planner'; until test -e told; do sleep 0.02; done; echo 'service listening on 127.0.0.1:7'; sleep 60"
)


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessGroup]:
    """Its processes run their first argument as a script of the shell."""

    def start(
        arguments: Sequence[str], log: Path, environment: Mapping[str, str], prefix: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            return subprocess.Popen(["sh", "-c", arguments[0]], stdout=out, stderr=out, cwd=tmp_path)

    monkeypatch.setattr(processes, "start_command", start)
    monkeypatch.setattr(processes, "QUIET_S", 0.0)
    with ProcessGroup() as group:
        yield group


def test_the_last_line_of_its_log_is_told_once(group: ProcessGroup, tmp_path: Path) -> None:
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        (tmp_path / "told").touch()

    service = group.add(Process("service", [COMPILES], tmp_path / "service.log"))
    assert service.endpoint(say) == "127.0.0.1:7"
    assert said == [f"waiting for the service, which says: compiling the planner (log: {tmp_path / 'service.log'})"]


class SlowMachine:
    """A clock on which the process has written no line, or another one, after half of the longest silence each."""

    def __init__(self, log: Path, lines: Sequence[str]) -> None:
        self.now_s, self._log, self._lines = 0.0, log, iter(lines)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, _: float) -> None:
        self.now_s += SILENT_S / 2
        with self._log.open("a") as log:
            log.write(next(self._lines, ""))


def test_one_that_goes_on_telling_is_waited_for_however_long(
    group: ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = group.add(Process("service", ["sleep 600"], log := tmp_path / "service.log"))
    clock = SlowMachine(log, [*(f"{count} functions\n" for count in range(20)), "", "a listening on b:7\n"])
    monkeypatch.setattr(processes, "time", clock)
    assert service.endpoint() == "b:7"
    assert clock.now_s > 10 * SILENT_S


def test_one_that_falls_silent_is_not(group: ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = group.add(Process("service", ["sleep 600"], log := tmp_path / "service.log"))
    monkeypatch.setattr(processes, "time", SlowMachine(log, ["3 functions\n"]))
    with pytest.raises(HeadraceError, match=r"written no line for 300 s, and listens nowhere yet; its last: 3 functions \(log: "):
        service.endpoint()
    assert service.exit_code() is None, "its end is its owner's"


def test_one_that_ends_is_not_waited_for(group: ProcessGroup, tmp_path: Path) -> None:
    service = group.add(Process("service", ["echo 'no port'; exit 2"], tmp_path / "service.log"))
    with pytest.raises(HeadraceError, match="the service did not start: no port"):
        service.endpoint()
