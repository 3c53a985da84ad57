"""Checks that yield a row and then go wrong, for processes of their own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

from benchmarks.gpu.target import Target
from benchmarks.report import Row

BEFORE = Row(name="before", value=1)


def well(target: Target) -> Iterator[Row]:
    yield BEFORE


def raises(target: Target) -> Iterator[Row]:
    yield BEFORE
    raise MemoryError("CUDA out of memory\n  tried to allocate " + "1" * 400)


def dies(target: Target) -> Iterator[Row]:
    yield BEFORE
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(target: Target) -> Iterator[Row]:
    yield BEFORE
    time.sleep(600)
