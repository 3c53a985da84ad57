"""How time and memory grow up to a million samples. Each strategy is measured in a process of its own.

Run as a program with a strategy and the sizes, it is that process: it prints a `Growth` as JSON.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
import numpy as np
from numpy.typing import NDArray

from benchmarks.planning.inputs import SEED, SYNTHCHART, plan_table, resampled
from benchmarks.report import Row, Section, at_most
from benchmarks.timing import progress, time_calls
from headrace.reorder_service.planning import STRATEGIES, warm_up

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PER_RANK, MICROBATCHES = 128, 16
SIZES = (1_024, 4_096, 16_384, 65_536, 262_144, 1_048_576)
QUICK_SIZES = (1_024, 16_384, 1_048_576)
FIT_FROM = 16_384
"""Smaller batches take a nearly constant time: they are left out of the exponent."""

TIME_GOAL_S, MEMORY_GOAL_MIB = 2.0, 1024.0
_BUDGET_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What one strategy needs for global batches of several sizes."""

    strategy: str
    sizes: Sequence[int]
    best_s: Sequence[float]
    largest: str
    """What else is to say about the time of the largest size."""
    before_mib: float
    """Resident memory of the warm process that holds the largest batch's costs, before that is planned."""
    peak_mib: float
    """The most that was ever resident up to the end of its first plan."""

    @property
    def exponent(self) -> float:
        """p of time = c * (n log n)^p, by least squares over the logarithms."""
        n, seconds = np.array(self.sizes, dtype=float), np.array(self.best_s)
        large = n >= FIT_FROM
        return float(np.polyfit(np.log(_n_log_n(n[large])), np.log(seconds[large]), 1)[0])


def measure(strategy: str, sizes: Sequence[int]) -> Growth:
    """To be called once in a fresh process: the peak of a process's memory does not fall again."""
    warm_up()
    table = resampled(SYNTHCHART.table(), max(sizes), SEED)
    before = _memory_mib("VmRSS")
    plan_table(strategy, table, SYNTHCHART.topology(max(sizes) // PER_RANK, MICROBATCHES))
    peak = _memory_mib("VmHWM")
    timings = []
    for n in sizes:
        part, topology = table.take(slice(n)), SYNTHCHART.topology(n // PER_RANK, MICROBATCHES)
        timings.append(time_calls(functools.partial(plan_table, strategy, part, topology), budget_s=_BUDGET_S))
    return Growth(
        strategy=strategy,
        sizes=sizes,
        best_s=[timing.best_s for timing in timings],
        largest=timings[-1].detail,
        before_mib=before,
        peak_mib=peak,
    )


def _memory_mib(field: str) -> float:
    """A figure of this process's own memory. (The peak that getrusage knows starts with that of the parent process.)"""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def sections(picture: Path, *, quick: bool) -> Iterator[Section]:
    """The largest size against its goals, and the exponents; draws the curves into `picture`."""
    sizes = QUICK_SIZES if quick else SIZES
    growths = [_measure_apart(strategy, sizes) for strategy in STRATEGIES]
    draw(growths, picture)
    n, shape = max(sizes), f"K={MICROBATCHES}, encoder 3 + llm 5 stages"
    yield Section(
        title=f"largest batch: n={n:,}, D={n // PER_RANK:,}, {shape}; warm, one core",
        rows=[row for growth in growths for row in _largest_rows(growth)],
    )
    yield Section(
        title=f"growth from n={FIT_FROM:,} to {n:,}, D=n/{PER_RANK}, {shape}: power of n log n (1 is n log n)",
        rows=[Row(name=f"exponent, {growth.strategy}", value=growth.exponent) for growth in growths],
    )


def _measure_apart(strategy: str, sizes: Sequence[int]) -> Growth:
    progress(f"scale: up to {max(sizes):,} samples, {strategy}")
    command = [sys.executable, "-m", "benchmarks.planning.scale", strategy, *map(str, sizes)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    return Growth(**json.loads(done.stdout))


def _largest_rows(growth: Growth) -> Iterator[Row]:
    yield Row(
        name=f"largest plan, {growth.strategy}",
        value=growth.best_s[-1],
        unit="s",
        goal=at_most(TIME_GOAL_S),
        detail=growth.largest,
    )
    yield Row(
        name=f"peak memory, {growth.strategy}",
        value=growth.peak_mib,
        unit="MiB",
        goal=at_most(MEMORY_GOAL_MIB),
        detail=f"{growth.peak_mib - growth.before_mib:.0f} MiB above warm",
    )


def draw(growths: Sequence[Growth], path: Path) -> None:
    """Seconds over samples, both logarithmic, with n log n as a guide below the curves."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for growth in growths:
        axes.loglog(growth.sizes, growth.best_s, marker="o", markersize=4, label=growth.strategy)
    n = np.array(growths[0].sizes, dtype=float)
    lowest = min(growth.best_s[-1] for growth in growths)
    axes.loglog(n, 0.5 * lowest * _n_log_n(n) / _n_log_n(n[-1]), color="gray", linestyle="--", label="n log n")
    axes.axhline(TIME_GOAL_S, color="gray", linewidth=0.8, linestyle=":")
    axes.annotate(f"goal at {int(n[-1]):,}: {TIME_GOAL_S:g} s", (n[0], TIME_GOAL_S), xytext=(0, 3), textcoords="offset points")
    axes.set_xlabel(f"samples in the global batch ({PER_RANK} per replica, {MICROBATCHES} microbatches each)")
    axes.set_ylabel("seconds to plan, one core")
    axes.set_title("Planning time of a global batch")
    axes.grid(which="major", alpha=0.3)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _n_log_n(n: NDArray[np.float64]) -> NDArray[np.float64]:
    return n * np.log(n)


if __name__ == "__main__":
    print(json.dumps(asdict(measure(sys.argv[1], [int(size) for size in sys.argv[2:]]))))
