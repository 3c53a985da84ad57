"""A Ray cluster of several nodes on this machine, each of which can be killed as a whole, and the driver beside it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.child_process import with_parent_death_signal

PREPROCESSOR = "headrace.cli preprocessor"
"""In the command line of a preprocessor that the driver started, and of no other process of a node."""
MARK = "RAY_NODE_OF_TESTS"
"""Variable by which the processes of a node are found, whoever has started them: its value is the node's."""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1"}
STORE_BYTES = 80_000_000
TIMEOUT_S = 120.0
HEAD = {"RAY_DASHBOARD_STARTUP_TIMEOUT_S": f"{TIMEOUT_S:.0f}"}  # waited for without a dashboard too; 60 s unasked
TRIES = 3
TOO_SLOW = "The current node timed out during startup"
"""What `ray start` says after 30 s, which nothing sets: where other programs have the machine, it is to be said again."""
POLL_S = 0.1


class RayNodes:
    """A head without processors, and nodes with one each. All end with the block, and what Ray has written is removed."""

    def __init__(self, folder: Path, *, python: Path | None = None) -> None:
        """`folder`: for logs. `python`: an interpreter that has Ray; None: this one."""
        self._python = str(python or sys.executable)
        self._folder = folder
        self._temporary = tempfile.mkdtemp(prefix="ray-")  # sockets need a short path
        self._names: list[str] = []
        self.address = ""

    def __enter__(self) -> RayNodes:
        """Start the head."""
        head = ["--head", "--port=0", "--num-cpus=0", "--include-dashboard=false", f"--temp-dir={self._temporary}"]
        try:
            self.address = self._start("head", head).partition("ray start --address='")[2].partition("'")[0]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(self._names):
            self.kill(name)
        shutil.rmtree(self._temporary, ignore_errors=True)

    def add(self, num_cpus: int = 1) -> str:
        """Start one more node, and return its name when it has joined."""
        name = f"node-{len(self._names)}"
        self._start(name, [f"--address={self.address}", f"--num-cpus={num_cpus}"])
        return name

    def hosts(self, text: str) -> list[str]:
        """Return the nodes that have a process with this in its command line."""
        return [name for name in self._names if any(text in command_line(pid) for pid in self._pids(name))]

    def pids(self, text: str) -> list[int]:
        """Return the processes of all nodes that have this in their command line."""
        return [pid for name in self._names for pid in self._pids(name) if text in command_line(pid)]

    def kill(self, name: str) -> None:
        """SIGKILL to all processes of a node: raylet, workers, and what these have started."""
        while pids := self._pids(name):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)

    def _start(self, name: str, options: Sequence[str]) -> str:
        """Start a node, and return what it has said when it had joined."""
        self._names.append(name)
        mark = f"{self._temporary}/{name}"
        ours = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}  # the driver's to pass on
        environment = {**ours, MARK: mark, **QUIET, **HEAD, "RAY_worker_niceness": "0"}
        common = [f"--object-store-memory={STORE_BYTES}", "--block", "--log-color=false"]
        command = [self._python, "-m", "ray.scripts.scripts", "start", *options, *common]
        log = self._folder / f"ray-{name}.log"
        for _ in range(TRIES - 1):
            if self._joined(command, log, environment):
                return log.read_text()
            assert TOO_SLOW in log.read_text(), log.read_text()
            self.kill(name)
        assert self._joined(command, log, environment), log.read_text()
        return log.read_text()

    def _joined(self, command: Sequence[str], log: Path, environment: dict[str, str]) -> bool:
        """Run `ray start`, and return whether its node has joined: else it has ended."""
        with log.open("wb") as output:
            process = subprocess.Popen(
                with_parent_death_signal([*command], signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        threading.Thread(target=process.wait, daemon=True).start()
        until(lambda: "This command will now block" in log.read_text() or process.returncode is not None, log.read_text)
        return process.returncode is None

    def _pids(self, name: str) -> list[int]:
        wanted = f"{MARK}={self._temporary}/{name}\0".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if wanted in path.read_bytes() + b"\0":
                    found.append(int(path.parent.name))
        return [pid for pid in found if pid != os.getpid()]


def command_line(pid: int) -> str:
    """The words of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


class Driver:
    """`headrace preprocessor --engine ray`, as a user starts it."""

    def __init__(self, nodes: RayNodes, reorder: str, log: Path, *options: str, python: Path | None = None) -> None:
        self.log = log
        arguments = ["preprocessor", "--reorder", reorder, "--engine", "ray", "--address", nodes.address, "--budget-mib", "64"]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                with_parent_death_signal(
                    [str(python or sys.executable), "-m", "headrace.cli", *arguments, *options], signal.SIGKILL
                ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **QUIET},
            )

    def lines(self, text: str) -> list[str]:
        """Return what it has said so far that has this text."""
        return [line for line in self.log.read_text(errors="replace").split("\n")[:-1] if text in line]

    def until(self, text: str, count: int = 1) -> list[str]:
        """Wait until it has said so many such lines."""
        until(lambda: len(self.lines(text)) >= count or self._process.poll() is not None, self.log.read_text)
        found = self.lines(text)
        assert len(found) >= count, self.log.read_text()
        return found

    def end(self) -> int:
        """Have it end by SIGTERM, and return its exit code."""
        self._process.terminate()
        return self.exit_code()

    def exit_code(self) -> int:
        """Wait until it has ended, and return its exit code."""
        return self._process.wait(TIMEOUT_S)


@contextmanager
def driving(nodes: RayNodes, reorder: str, log: Path, *options: str, python: Path | None = None) -> Iterator[Driver]:
    """A driver for the block, which ends well by SIGTERM."""
    driver = Driver(nodes, reorder, log, *options, python=python)
    try:
        yield driver
    finally:
        code = driver.end()
    assert code == 0, log.read_text()


def until(is_so: Callable[[], bool], what: Callable[[], str]) -> None:
    """Wait until something is so. Raises TimeoutError with `what` there is instead."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError(what())
        time.sleep(POLL_S)
