"""The memory of a preprocessor over many samples of very different sizes, with a trainer that is slower than it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.preprocess.meter import memory_bytes
from benchmarks.preprocess.services import LONGEST_S, measure, services, trainer_command
from benchmarks.preprocess.workload import GLOBAL_BATCH, job_spec, write_spread
from benchmarks.report import Row, Section, at_most
from benchmarks.timing import progress

SAMPLES, SHARDS, SMALLEST_PIXELS, SPREAD = 10_000, 10, 8_000, 20
EPOCHS = 2
"""Enough to tell growth from the ups and downs of malloc, which are some MiB."""
BUDGET_MIB = 256
WINDOW = 40
"""Global batches ahead: with samples of about 150 kB, more than the budget holds."""
TRAINER_RATE = 300.0
"""Samples per second that the emulated trainer takes: less than a preprocessor gives, so that its store is full."""
OVER_GOAL = 1.1
SLOPE_GOAL_MIB = 1.0
EVERY_S = 0.1
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Course:
    """What was seen, sample by sample of the clock."""

    listening_bytes: int
    """Before its first job."""
    baseline_bytes: int
    """After a first small job: Python, libraries, kernels, tokenizer, scratch. Without shared memory, which is payload's."""
    times_s: list[float]
    sizes_bytes: list[int]
    private_bytes: list[int]
    """Of `sizes_bytes`, what is not shared memory; that is bounded by the arena's size and fills up in time."""

    def grown_mib(self) -> float:
        """At most, above the baseline."""
        return (max(self.sizes_bytes) - self.baseline_bytes) / _MIB

    def shared_mib(self) -> float:
        """At most."""
        return max(size - private for size, private in zip(self.sizes_bytes, self.private_bytes, strict=True)) / _MIB

    def slope_mib(self, per_s: float) -> float:
        """Growth of private memory in the second half, in `per_s` seconds: a straight line through it."""
        half = len(self.times_s) // 2
        slope = np.polyfit(self.times_s[half:], self.private_bytes[half:], 1)[0]
        return float(slope) * per_s / _MIB


def sections(folder: Path, *, quick: bool) -> list[Section]:
    """One preprocessor with two threads; shards are written into `folder`."""
    num_samples = SAMPLES // 10 if quick else SAMPLES
    write_spread(folder, num_samples, SHARDS, smallest=SMALLEST_PIXELS, spread=SPREAD)
    progress(f"memory: {num_samples:,} samples")
    course, delivered = _run(folder)
    grown, slope = course.grown_mib(), course.slope_mib(1000 / TRAINER_RATE)
    rows = [
        Row(
            name=f"most above the baseline, of --budget-mib {BUDGET_MIB}",
            value=grown,
            unit="MiB",
            goal=at_most(OVER_GOAL * BUDGET_MIB),
            detail=f"shared memory included, of which there is {course.shared_mib():.0f} MiB",
        ),
        Row(
            name="growth of private memory in the second half, for 1,000 samples",
            value=slope,
            unit="MiB",
            goal=at_most(SLOPE_GOAL_MIB),
        ),
        Row(
            name="the baseline: after a first job of two batches, without shared memory",
            value=course.baseline_bytes / _MIB,
            unit="MiB",
            detail=f"{course.listening_bytes / _MIB:.0f} MiB before that job: no tokenizer yet, libraries read in part",
        ),
        Row(name="delivered", value=delivered, unit="samples"),
    ]
    model = f"the model is EMULATED, at {TRAINER_RATE:.0f} samples/s, so that the store is full"
    title = f"Memory of a preprocessor: {num_samples:,} samples of {SPREAD}x size spread; {model}"
    return [Section(title=title, rows=rows)]


def _run(folder: Path) -> tuple[_Course, int]:
    """The course of memory, and the samples that the trainer got."""
    arguments = ("--threads", "2", "--budget-mib", str(BUDGET_MIB))
    with services([arguments]) as running, ThreadPoolExecutor(1) as pool:
        pid = running.preprocessor_pids[0]
        listening_bytes, _ = memory_bytes(pid)
        first = running.submit(job_spec(folder, name="first", steps=2))
        measure(trainer_command(running.endpoint, first, skip=GLOBAL_BATCH, seconds=LONGEST_S))
        resident_bytes, shared_bytes = memory_bytes(pid)
        job = running.submit(job_spec(folder, epochs=EPOCHS, window=WINDOW))
        extra = ["--rate", str(TRAINER_RATE)]
        command = trainer_command(running.endpoint, job, skip=GLOBAL_BATCH, seconds=LONGEST_S, extra=extra)
        reading = pool.submit(measure, command)
        times_s, sizes_bytes, private_bytes = [], [], []
        while not reading.done():
            times_s.append(time.monotonic())
            resident, shared = memory_bytes(pid)
            sizes_bytes.append(resident)
            private_bytes.append(resident - shared)
            time.sleep(EVERY_S)
        delivered = GLOBAL_BATCH + reading.result().samples
    course = _Course(
        listening_bytes=listening_bytes,
        baseline_bytes=resident_bytes - shared_bytes,
        times_s=times_s,
        sizes_bytes=sizes_bytes,
        private_bytes=private_bytes,
    )
    return course, delivered
