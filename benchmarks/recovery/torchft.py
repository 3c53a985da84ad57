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
from benchmarks.report import Rival
from benchmarks.timing import progress
from headrace.child_process import with_parent_death_signal

NUM_REPLICAS = 6
LOSSES = 3  # one after the other: 6, 5 and 4 replicas are left with one less
_STEPS = 6  # before each loss
_PATIENCE_S = 120.0
_POLL_S = 0.01
_ROOT = Path(__file__).parents[2]
_EARLIER_S = {"default": 5.07, "tuned": 0.49, "stopped": 2.17}  # of torchft on gloo, as measured on two cores in November 2026


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of lighthouse and replicas."""

    heartbeat_timeout_ms: int
    tick_ms: int
    heartbeat_ms: int
    timeout_s: float


DEFAULT = Settings(heartbeat_timeout_ms=5000, tick_ms=100, heartbeat_ms=100, timeout_s=60.0)
TUNED = Settings(heartbeat_timeout_ms=400, tick_ms=10, heartbeat_ms=50, timeout_s=2.0)


def rivals(folder: Path, *, quick: bool) -> Mapping[str, Rival]:
    """Median seconds from a loss to the next commit, beyond a step: 'default' and 'tuned' for SIGKILL, 'stopped' for SIGSTOP.

    A kind is left out where nothing was committed in time behind a loss: how long we wait is no time of torchft's.
    """
    kills = [signal.SIGKILL] * (1 if quick else LOSSES)
    try:
        python = python_of(TORCHFT)
        measured = {
            "default": ("torchft, its default", _losses(python, folder, DEFAULT, kills)),
            "tuned": ("torchft, tuned", _losses(python, folder, TUNED, kills)),
            "stopped": ("torchft, tuned", _losses(python, folder, TUNED, [signal.SIGSTOP])),
        }
        return {
            kind: Rival(value=median(seconds), source=who) for kind, (who, seconds) in measured.items() if seconds is not None
        }
    except (NotInstalledError, TimeoutError) as err:
        progress(f"torchft: figures of an earlier run, for {err}")
        return {name: Rival(value=value, source="torchft, measured earlier") for name, value in _EARLIER_S.items()}


def _losses(python: Path, folder: Path, settings: Settings, signals: Sequence[signal.Signals]) -> list[float] | None:
    """Seconds from each signal, to another replica each, until the first one commits a step without that, less a step.

    None where it commits nothing within _PATIENCE_S.
    """
    command = [str(python), "-m", "benchmarks.peers.torchft_ddp"]
    seconds = []
    with ExitStack() as stack:
        log = folder / "torchft-lighthouse.log"
        timeouts = ["--heartbeat-timeout-ms", str(settings.heartbeat_timeout_ms), "--tick-ms", str(settings.tick_ms)]
        stack.enter_context(_running([*command, "lighthouse", *timeouts], log))
        _wait("its lighthouse", lambda: log.read_text(encoding="utf-8").endswith("\n"))
        options = ["--heartbeat-ms", str(settings.heartbeat_ms), "--timeout-s", str(settings.timeout_s)]
        options += ["--lighthouse", log.read_text(encoding="utf-8").strip()]
        logs = [folder / f"torchft-{number}.log" for number in range(NUM_REPLICAS)]
        replicas = [
            stack.enter_context(_running([*command, "replica", "--name", f"replica_{number}", *options], log))
            for number, log in enumerate(logs)
        ]
        for number, how in enumerate(signals):
            progress(f"torchft: {how.name} of a replica, round {number + 1} of {len(signals)}")
            loss_s = _loss(logs[0], replicas[-1 - number], how, NUM_REPLICAS - number)
            if loss_s is None:
                return None
            seconds.append(loss_s)
    return seconds


def _loss(log: Path, victim: subprocess.Popen[bytes], how: signal.Signals, num_replicas: int) -> float | None:
    """log: of a replica that is left. None where it commits nothing within _PATIENCE_S."""
    _wait(f"{num_replicas} replicas", lambda: [n for _, n in _commits(log)][-_STEPS - 1 :] == [num_replicas] * (_STEPS + 1))
    times = [time_s for time_s, _ in _commits(log)][-_STEPS - 1 :]
    lost_s = time.time()
    os.kill(victim.pid, how)

    def since() -> list[float]:
        return [time_s for time_s, n in _commits(log) if time_s > lost_s and n < num_replicas]

    try:
        _wait("a commit", since)
    except TimeoutError as err:
        progress(f"torchft: {err}")
        return None
    return since()[0] - lost_s - median(end - begin for begin, end in pairwise(times))


def _commits(log: Path) -> list[tuple[float, int]]:
    """When the replica committed each step, and with how many."""
    lines = [line.split() for line in log.read_text(encoding="utf-8").split("\n")[:-1]]
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
    environment = {**os.environ, "PYTHONPATH": f"{_ROOT}:{_ROOT / 'proto'}"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            with_parent_death_signal(command, signal.SIGKILL), stdout=output, stderr=subprocess.DEVNULL, env=environment
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
