"""Replaces the clocks, ids and random numbers of the standard library while a simulation runs.

`install` must be called before anything of Headrace is imported: dataclasses keep the functions that they were declared with.
"""

from __future__ import annotations

import asyncio
import gc
import random
import secrets
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from tests.simulation.virtual_loop import PROCESS, VirtualLoop

BEGAN_S = 1_800_000_000.0  # the wall clock when a simulation begins

_real: dict[str, Callable[..., Any]] = {}
_loop: VirtualLoop | None = None
_random = Random()
_sleep: Callable[[float], None] = time.sleep


def _monotonic() -> float:
    if _loop is None:
        return float(_real["monotonic"]())
    process = PROCESS.get()
    return _loop.now_s + (process.booted_s if process is not None else 0.0)


def _perf_counter() -> float:
    return float(_real["perf_counter"]()) if _loop is None else _loop.time()


def _wall() -> float:
    return float(_real["time"]()) if _loop is None else BEGAN_S + _loop.time()


def _uuid4() -> uuid.UUID:
    found: uuid.UUID = _real["uuid4"]() if _loop is None else uuid.UUID(int=_random.getrandbits(128), version=4)
    return found


def _token_bytes(num_bytes: int | None = None) -> bytes:
    return bytes(_real["token_bytes"](num_bytes)) if _loop is None else _random.randbytes(num_bytes or 32)


def _sleeping(seconds: float) -> None:
    _real["sleep"](seconds) if _loop is None else _sleep(seconds)


def install() -> None:
    """Replace the functions for good; outside of `simulating` they call the real ones.

    Python collects no garbage by itself any more, as finalizers would run at moments that depend on what ran before.
    """
    gc.disable()
    for module, name, ours in (
        (time, "monotonic", _monotonic),
        (time, "perf_counter", _perf_counter),
        (time, "time", _wall),
        (time, "sleep", _sleeping),
        (uuid, "uuid4", _uuid4),
        (secrets, "token_bytes", _token_bytes),
    ):
        _real[name] = getattr(module, name)
        setattr(module, name, ours)


def forget_former_runs() -> None:
    """Collect what former runs have left, so that nothing of it ends in the next one.

    What is there then is there for good, and no collection looks at it again. So call it while no part of a world is there.
    """
    gc.collect()
    gc.freeze()


def real_time_s() -> float:
    """The real monotonic clock in seconds."""
    return float(_real["monotonic"]())


@contextmanager
def simulating(loop: VirtualLoop, seed: int, sleep: Callable[[float], None]) -> Iterator[None]:
    """Take clocks from `loop`, and ids and random numbers from the seed, during the block. `sleep` stands in for time.sleep."""
    global _loop, _random, _sleep
    assert _real, "determinism.install() was not called"
    _loop, _random, _sleep = loop, Random(f"{seed} ids"), sleep
    random.seed(f"{seed} random")
    asyncio.set_event_loop(loop)
    try:
        yield
    finally:
        _loop = None
        asyncio.set_event_loop(None)
