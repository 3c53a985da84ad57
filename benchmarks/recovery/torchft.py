"""torchft on gloo: how soon its replicas commit again after one of them is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.peers import TORCHFT
from benchmarks.peers.environment import NotInstalledError, python_of
from benchmarks.recovery.training import HUGE_PAGES
from benchmarks.report import Rival
from benchmarks.timing import progress
from headrace.child_process import with_parent_death_signal

NUM_REPLICAS = 6
_STEPS = 6  # before each loss
_STEPS_LEFT = 4  # after it, before the replica is there again
_PATIENCE_S = 120.0
_POLL_S = 0.01
_ROOT = Path(__file__).parents[2]
_EARLIER_S = {"default": 5.07, "tuned": 0.64, "stopped": 0.72}  # of torchft on gloo, as measured on two cores in November 2026


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of lighthouse and replicas."""

    heartbeat_timeout_ms: int
    tick_ms: int
    heartbeat_ms: int
    timeout_s: float


DEFAULT = Settings(heartbeat_timeout_ms=5000, tick_ms=100, heartbeat_ms=100, timeout_s=60.0)
TUNED = Settings(heartbeat_timeout_ms=400, tick_ms=10, heartbeat_ms=50, timeout_s=0.5)


def rivals(folder: Path, killed: Sequence[float], stopped: Sequence[float]) -> Mapping[str, Rival]:
    """Median seconds from a loss to the next commit, beyond a step: 'default' and 'tuned' for SIGKILL, 'stopped' for SIGSTOP.

    `killed`, `stopped`: the moments of a step, as parts of it, at which replicas are lost one after the other. A kind is left out
    where nothing was committed in time behind a loss: how long we wait is no time of torchft's.
    """
    try:
        python = python_of(TORCHFT)
        measured = {
            "default": ("torchft, its default", _losses(python, folder, DEFAULT, signal.SIGKILL, killed)),
            "tuned": ("torchft, tuned", _losses(python, folder, TUNED, signal.SIGKILL, killed)),
            "stopped": ("torchft, tuned", _losses(python, folder, TUNED, signal.SIGSTOP, stopped)),
        }
        return {
            kind: Rival(value=median(seconds), source=f"{who}: {', '.join(f'{one:.2f}' for one in seconds)}")
            for kind, (who, seconds) in measured.items()
            if seconds is not None
        }
    except (NotInstalledError, TimeoutError) as err:
        progress(f"torchft: figures of an earlier run, for {err}")
        return {name: Rival(value=value, source="torchft, measured earlier") for name, value in _EARLIER_S.items()}


def _losses(python: Path, folder: Path, settings: Settings, how: signal.Signals, moments: Sequence[float]) -> list[float] | None:
    """Seconds from each loss until the first replica commits a step without the lost one, less a step; see `_Replicas.lose`."""
    with _Replicas(python, folder, settings) as replicas:
        seconds = []
        for number, moment in enumerate(moments):
            progress(f"torchft: {how.name} of a replica, round {number + 1} of {len(moments)}")
            loss_s = replicas.lose(1 + number % (NUM_REPLICAS - 1), moment, how)
            if loss_s is None:
                return None
            seconds.append(loss_s)
        return seconds


class _Replicas:
    """A lighthouse, and replicas that train until they are killed."""

    def __init__(self, python: Path, folder: Path, settings: Settings) -> None:
        self._command = [str(python), "-m", "benchmarks.peers.torchft_ddp"]
        self._settings = settings
        self._lighthouse_log = folder / "torchft-lighthouse.log"
        self._logs = [folder / f"torchft-{number}.log" for number in range(NUM_REPLICAS)]
        self._stack = ExitStack()
        self._options: list[str] = []
        self._replicas: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> _Replicas:
        with self._stack:
            settings, log = self._settings, self._lighthouse_log
            timeouts = ["--heartbeat-timeout-ms", str(settings.heartbeat_timeout_ms), "--tick-ms", str(settings.tick_ms)]
            self._stack.enter_context(_running([*self._command, "lighthouse", *timeouts], log))
            _wait("its lighthouse", lambda: log.read_text(encoding="utf-8").endswith("\n"))
            self._options = ["--heartbeat-ms", str(settings.heartbeat_ms), "--timeout-s", str(settings.timeout_s)]
            self._options += ["--lighthouse", log.read_text(encoding="utf-8").strip()]
            self._replicas = [self._start(number) for number in range(NUM_REPLICAS)]
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        name = f"replica_{number}_{time.monotonic_ns()}"  # a new one each time, as its lighthouse still knows the lost one
        command = [*self._command, "replica", "--name", name, *self._options]
        return self._stack.enter_context(_running(command, self._logs[number]))

    def lose(self, number: int, moment: float, how: signal.Signals) -> float | None:
        """Lose a replica, other than the first one, at a moment of a step; afterwards it is there again.

        Seconds from the signal until the first replica commits a step without the lost one, less the median of the steps behind
        it: a replica computes the same with and without others, but on shared cores in less time when they are fewer. None where
        nothing is committed within _PATIENCE_S.
        """
        _wait(f"{NUM_REPLICAS} replicas", lambda: self._together(NUM_REPLICAS, _STEPS))
        times = [time_s for time_s, _ in self._commits()][-_STEPS - 1 :]
        step_s = median(end - begin for begin, end in pairwise(times))
        time.sleep(max(0.0, times[-1] + moment * step_s - time.time()))
        lost_s, victim = time.time(), self._replicas[number]
        os.kill(victim.pid, how)

        def since() -> list[float]:
            return [time_s for time_s, n in self._commits() if time_s > lost_s and n < NUM_REPLICAS]

        try:
            _wait("a commit", lambda: len(since()) > _STEPS_LEFT)
        except TimeoutError as err:
            progress(f"torchft: {err}")
            return None
        times = since()[: _STEPS_LEFT + 1]
        victim.kill()
        victim.wait()
        self._replicas[number] = self._start(number)
        return times[0] - lost_s - median(end - begin for begin, end in pairwise(times))

    def _together(self, count: int, steps: int) -> bool:
        """Whether the last steps were committed with so many replicas."""
        return [n for _, n in self._commits()][-steps - 1 :] == [count] * (steps + 1)

    def _commits(self) -> list[tuple[float, int]]:
        """When the first replica committed each step, and with how many."""
        lines = [line.split() for line in self._logs[0].read_text(encoding="utf-8").split("\n")[:-1]]
        return [(float(time_s), int(number)) for _, time_s, number in lines]


def _wait(what: str, come: Callable[[], object]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not come():
        if time.monotonic() > deadline:
            raise TimeoutError(f"there was no sign of {what} within {_PATIENCE_S:g} s")
        time.sleep(_POLL_S)


@contextmanager
def _running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Its output alone in `log`, what it logs thrown away."""
    environment = {**os.environ, **HUGE_PAGES, "PYTHONPATH": f"{_ROOT}:{_ROOT / 'proto'}"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            with_parent_death_signal(command, signal.SIGKILL), stdout=output, stderr=subprocess.DEVNULL, env=environment
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
