"""Rates in the steady state: samples, seconds and seconds of the cores between two borders of batches."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a contender measured of itself. Printed as one line of JSON."""

    samples: int
    seconds: float
    main_cpu_s: float
    """Of the process that takes the batches, all of its threads."""
    tree_cpu_s: float
    """Of that process and all that it started, and they."""
    watched_cpu_s: list[float] = field(default_factory=list)
    """Of other processes that it was told to watch, each with what it started."""
    idle_s: list[float] = field(default_factory=list)
    """Of each core of the machine, when nobody used it."""
    waits_s: list[float] = field(default_factory=list)
    """Of every step, how long the data was waited for; where that was asked for."""

    @property
    def cpu_s(self) -> float:
        """Of all processes of the contender."""
        return self.tree_cpu_s + sum(self.watched_cpu_s)

    @property
    def rate(self) -> float:
        """Samples per second, what others took of the machine left out."""
        return self.rate_on(range(len(self.idle_s)), self.cpu_s)

    def rate_on(self, cores: Iterable[int], cpu_s: float) -> float:
        """Samples per second of these cores, where ours used `cpu_s` of them, and left idle what nobody used.

        What other programs took meanwhile counts as if the cores had not been there. Without others it is the plain rate. With
        many of them it is too high for who waits by himself, since they then use the time in which he does.
        """
        idle = [self.idle_s[core] for core in cores]
        return self.samples * len(idle) / (cpu_s + sum(idle))

    @property
    def taken(self) -> float:
        """The share of the machine that others had."""
        return max(0.0, 1 - (self.cpu_s + sum(self.idle_s)) / (self.seconds * len(self.idle_s)))

    def print(self) -> None:
        print(json.dumps(asdict(self)), flush=True)

    @staticmethod
    def parse(output: str) -> Reading:
        """The reading in what a contender printed. Raises ValueError where there is none."""
        lines = [line for line in output.splitlines() if line.startswith("{")]
        if not lines:
            raise ValueError(f"no reading, but: {output.strip()[-500:]!r}")
        return Reading(**json.loads(lines[-1]))


class Meter:
    """Skips the first samples, then counts until its time is over.

    while meter.add(len(batch)): ...
    """

    def __init__(self, *, skip_samples: int, seconds: float, watched: Sequence[int] = ()) -> None:
        """`watched`: process ids."""
        self._skip = skip_samples
        self._seconds = seconds
        self._seen = 0
        self._samples = 0
        self._watched = watched
        self._began_s: float | None = None
        self._main_cpu_s = 0.0
        self._idle_s: list[float] = []
        self._trees_cpu_s: list[float] = []

    @property
    def counting(self) -> bool:
        """Whether the first samples are over."""
        return self._began_s is not None

    def add(self, num_samples: int) -> bool:
        """Count a batch that was consumed. False at the end."""
        if self._began_s is None:
            self._seen += num_samples
            if self._seen >= self._skip:
                self._main_cpu_s, self._idle_s, self._trees_cpu_s = time.process_time(), idle_s(), self._read_trees()
                self._began_s = time.perf_counter()
            return True
        self._samples += num_samples
        return time.perf_counter() - self._began_s < self._seconds

    def reading(self, waits_s: Sequence[float] = ()) -> Reading:
        """Of the time since the first samples. Raises ValueError where there is none."""
        if self._began_s is None or not self._samples:
            raise ValueError(f"the data ended after {self._seen} samples, before anything could be measured")
        seconds, main_cpu_s = time.perf_counter() - self._began_s, time.process_time() - self._main_cpu_s
        idle = idle_s()
        own, *watched = (now - before for now, before in zip(self._read_trees(), self._trees_cpu_s, strict=True))
        return Reading(
            samples=self._samples,
            seconds=seconds,
            main_cpu_s=main_cpu_s,
            tree_cpu_s=own,
            watched_cpu_s=watched,
            idle_s=[now - before for now, before in zip(idle, self._idle_s, strict=True)],
            waits_s=list(waits_s),
        )

    def _read_trees(self) -> list[float]:
        """Of this process, then of those that are watched."""
        return [tree_cpu_s(pid) for pid in (os.getpid(), *self._watched)]


def tree_cpu_s(root: int) -> float:
    """Seconds that a process, its descendants, and those of them that ended have used of the cores."""
    parents, seconds = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        pid = int(stat.parent.name)
        parents[pid] = int(fields[1])
        seconds[pid] = sum(map(int, fields[11:15])) * _TICK_S  # user, system, and both of children that were waited for
    family = {root}
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    return sum(seconds.get(pid, 0.0) for pid in family)


def idle_s() -> list[float]:
    """Seconds that each core has been idle since the machine's start."""
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    cores = [line for line in lines if line[0].startswith("cpu") and line[0] != "cpu"]
    return [(int(line[4]) + int(line[5])) * _TICK_S for line in cores]  # idle, and idle while a disk is waited for


def memory_bytes(pid: int) -> tuple[int, int]:
    """What a process has in memory, and how much of it is shared memory that it has touched."""
    lines = (line.partition(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    kib = {name: int(value.split()[0]) for name, _, value in lines if name in ("VmRSS", "RssShmem")}
    return kib["VmRSS"] << 10, kib["RssShmem"] << 10


def most_memory_bytes(pid: int) -> int:
    """What a process had in memory at most since its start, shared memory included."""
    return _proc_number(pid, "status", "VmHWM") << 10


def read_bytes(pid: int) -> int:
    """What a process has read by system calls, whether from a disk or from the page cache."""
    return _proc_number(pid, "io", "rchar")


def _proc_number(pid: int, file: str, name: str) -> int:
    lines = (line.partition(":") for line in Path(f"/proc/{pid}/{file}").read_text().splitlines())
    return next(int(value.split()[0]) for key, _, value in lines if key == name)
