"""Start, watch and end `headrace` commands as child processes, together and whatever happens."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

from headrace.child_process import how_ended, with_parent_death_signal
from headrace.errors import HeadraceError

SILENT_S = 300.0  # a start without a line for so long has failed; the planner says every few seconds how far it is compiled
QUIET_S = 5.0  # a start that takes no longer is not worth a word
POLL_S = 0.02
STOP_TIMEOUT_S = 1.0  # from SIGTERM to SIGKILL
EARLY_EXIT_S = 10.0  # a process that ends sooner could perhaps not start at all
MAX_EARLY_EXITS = 3  # in a row, each followed by another start
_PORTS = range(20000, 32000)  # below the ephemeral ports


def start_command(
    arguments: Sequence[str], log: Path, environment: Mapping[str, str], prefix: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Start `headrace` with these arguments, as a child that dies with this process. All its output is added to `log`.

    environment: variables to add to those of this process. prefix: a program that becomes the command, such as `ip netns exec
    NAME`.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            with_parent_death_signal([*prefix, sys.executable, "-m", "headrace.cli", *arguments], signal.SIGKILL),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            start_new_session=True,  # Ctrl-C in the terminal reaches this process only, which ends its children in order
        )


class Process:
    """A `headrace` command that runs as a child. All its output goes to `log`."""

    def __init__(
        self,
        name: str,
        arguments: list[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        """`environment`: variables to add to those of this process. `prefix`: as of `start_command`."""
        self._environment = environment or {}
        self._prefix = prefix
        self.name = name
        self.log = log
        self._arguments = arguments
        log.write_bytes(b"")  # drops the log of an earlier run
        self._early_exits = 0
        self.start()

    def start(self) -> None:
        """Start the process (again). It dies with this process, even if that is killed."""
        self._started_s = time.monotonic()
        self._log_start = self.log.stat().st_size
        self._popen = start_command(self._arguments, self.log, self._environment, self._prefix)

    def restart(self) -> None:
        """Start the process again after it has ended. Raises HeadraceError if it has often ended soon after its start."""
        early = time.monotonic() - self._started_s < EARLY_EXIT_S
        self._early_exits = self._early_exits + 1 if early else 0
        if self._early_exits > MAX_EARLY_EXITS:
            raise HeadraceError(f"{self.name} ended {self._early_exits} times soon after its start: {self.last_words()}")
        self.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def exit_code(self) -> int | None:
        """Exit code of the process; None while it runs."""
        return self._popen.poll()

    def endpoint(self, say: Callable[[str], object] | None = None) -> str:
        """Wait until the log says where the process listens, however long that takes, and return that endpoint.

        Raises HeadraceError if the process ends before, or writes no line for SILENT_S. `say` is told once, after QUIET_S, what
        the process says that it does meanwhile.
        """
        begin = heard = time.monotonic()
        lines = 0
        while True:
            has_ended = self.exit_code() is not None  # asked before its last lines are read
            found = self._lines()
            if (endpoint := _behind(" listening on ", found)) is not None:
                return endpoint
            if has_ended:
                raise HeadraceError(f"the {self.name} did not start: {self.last_words()}")
            now = time.monotonic()
            if len(found) > lines:
                lines, heard = len(found), now
            if now > heard + SILENT_S:
                silence = f"has written no line for {SILENT_S:g} s, and listens nowhere yet"
                raise HeadraceError(f"the {self.name} {silence}; its last: {self.last_words()}")
            if say is not None and now > begin + QUIET_S and self.last_lines(1):
                say(f"waiting for the {self.name}, which says: {self.last_words()}")
                say = None
            time.sleep(POLL_S)

    def said(self, words: str) -> str | None:
        """Return what follows these words in the first whole line of the log that has them; None where there is none."""
        return _behind(words, self._lines())

    def _lines(self) -> list[str]:
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace").split("\n")

    def last_lines(self, count: int) -> list[str]:
        """Return the last lines that the process has written since its start, at most so many."""
        return [line for line in self._lines() if line.strip()][-count:]

    def last_words(self) -> str:
        """Return the last line of the process's log, and where the rest is."""
        return f"{''.join(self.last_lines(1)) or 'no word of it'} (log: {self.log})"

    def end(self) -> str:
        """Return in a sentence how the process has ended, what it wrote last, and where the rest is."""
        code = self.exit_code()
        assert code is not None, "it runs"
        return f"{self.name} {how_ended(code)}: {self.last_words()}"

    def terminate(self) -> None:
        """Ask the process to end, if it runs."""
        if self._popen.poll() is None:
            self._popen.terminate()

    def wait(self, timeout_s: float) -> None:
        """Wait for the process to end; after `timeout_s`, kill it."""
        try:
            self._popen.wait(timeout=max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


def _behind(words: str, lines: Sequence[str]) -> str | None:
    return next((line.partition(words)[2] for line in lines[:-1] if words in line), None)  # the last one may be half written


class ProcessGroup:
    """Processes that are ended together at the end of a `with` block."""

    def __init__(self, *, sigterm_interrupts: bool = True) -> None:
        """`sigterm_interrupts`: SIGTERM to this process counts as Ctrl-C within the block; False: what it does stays as it is."""
        self.processes: list[Process] = []
        self._sigterm_interrupts = sigterm_interrupts

    def add(self, process: Process) -> Process:
        self.processes.append(process)
        return process

    def __enter__(self) -> ProcessGroup:
        if self._sigterm_interrupts:
            self._former = signal.signal(signal.SIGTERM, _interrupt)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with _no_interrupt():  # a second Ctrl-C must not leave any process behind
            deadline = time.monotonic() + STOP_TIMEOUT_S
            for process in reversed(self.processes):
                process.terminate()
            for process in reversed(self.processes):
                process.wait(deadline - time.monotonic())
        if self._sigterm_interrupts:
            signal.signal(signal.SIGTERM, self._former)


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Ignore Ctrl-C for the block, where this is the thread that gets it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def free_port(*hosts: str) -> int:
    """Return a port that is free at each of `hosts` (none: 127.0.0.1), and stays so unless a process is told to listen there.

    Raises HeadraceError if there is none, or a host is another machine.
    """
    error: OSError | None = None
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with contextlib.ExitStack() as stack:
            try:
                for host in hosts or ("127.0.0.1",):
                    stack.enter_context(socket.create_server((host, port)))
            except OSError as err:
                error = err
                continue
        return port
    raise HeadraceError(f"no port of {_PORTS.start} to {_PORTS.stop - 1} is free: {error}")


def torchrun_environments(num_ranks: int, port: int | None = None) -> list[dict[str, str]]:
    """Return what torchrun sets for each of `num_ranks` processes on this host. They meet at `port`; None: at a free one."""
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port())}
    world |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_ranks))
    return [world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
