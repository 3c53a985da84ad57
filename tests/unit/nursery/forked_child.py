"""`python -m tests.unit.nursery.forked_child`: a nursery whose forks write into their log, and end or wait."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.nursery.forking import leave, serve

LONG_S = 100.0
"""Longer than any test waits: a fork that waits is killed."""


def prepare() -> None:
    """Import nothing."""


def run(log: str, code: int | None) -> int:
    leave(Path(log))
    print("here", flush=True)
    if code is None:
        time.sleep(LONG_S)
        raise TimeoutError("nobody has killed it")
    return code


if __name__ == "__main__":
    sys.exit(serve(run))
