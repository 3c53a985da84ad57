"""How long a call takes once it is warm."""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter, process_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Wall-clock seconds of repeated calls."""

    best_s: float
    median_s: float
    cpu_s: float
    """The least time of all cores in a call: less than `best_s` if other programs took turns, more if there were threads."""
    repetitions: int

    @property
    def detail(self) -> str:
        """What to say in a report's row beside the best."""
        scale, unit = (1.0, "s") if self.best_s >= 1 else (1e3, "ms")
        return f"median {self.median_s * scale:.3g}, cpu {self.cpu_s * scale:.3g} {unit} of {self.repetitions}"


def time_calls(call: Callable[[], object], *, budget_s: float, least: int = 3, most: int = 50) -> Timing:
    """Repeat a call until `budget_s` is used up, `least` times at the least and `most` at the most.

    One call before the first timed one warms caches; the garbage collector is off meanwhile. The result of a
    call is freed outside its time.
    """
    call()
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    gc.collect()
    gc.disable()
    try:
        started = perf_counter()
        while len(seconds) < least or (len(seconds) < most and perf_counter() - started < budget_s):
            cpu_begin, begin = process_time(), perf_counter()
            result = call()
            seconds.append(perf_counter() - begin)
            cpu_seconds.append(process_time() - cpu_begin)
            del result
    finally:
        gc.enable()
    return Timing(best_s=min(seconds), median_s=statistics.median(seconds), cpu_s=min(cpu_seconds), repetitions=len(seconds))


def progress(text: str) -> None:
    """Say on standard error what is being measured."""
    print(f"  {text}", file=sys.stderr, flush=True)


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile of two values or more, interpolated between those next to it."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
