"""One rank of a job that only sums a number in each step, and in which one rank does not come to the end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from headrace.errors import HeadraceError, UserError
from headrace.observability.logs import configure_logging
from headrace.trainer.rank_progress import PROGRESS
from headrace.trainer.side_channel import SideChannel
from headrace.trainer.starting import process_group, rank, watched
from tests.endless_backend import use_endless

HELD_AT_ITS_END = "held at its end"
STEPS, FAULTY_STEP, FAULTY_RANK = 4, 2, 3


def _raise(error: Exception) -> None:
    raise error


def _hang() -> None:
    time.sleep(1000)


FAULTS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    HELD_AT_ITS_END: lambda: None,
    "user error": lambda: _raise(UserError("the batch has no samples: take a larger one")),
    "unexpected": lambda: _raise(ZeroDivisionError("division by zero")),
    "hang": _hang,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
}
BACKENDS: dict[str, Callable[[], None]] = {
    "gloo": lambda: None,
    "endless": use_endless,
    "endless, abort too": partial(use_endless, aborts=False),
}
"""What the ranks wait in."""


def _stop_once_done(channel: SideChannel) -> None:
    """Stop the process between its word that it is done and its end, until somebody else lets it go on."""
    while not channel.has_said_done:
        time.sleep(1e-3)
    os.kill(os.getpid(), signal.SIGSTOP)


def run_rank(environment: dict[str, str], fault: str, faulty_rank: int, hang_timeout_s: float, log: Path, backend: str) -> None:
    """Run the rank with its standard error in `log`. Exit code: that of `headrace train`, where the watch leaves it one.

    `backend`: one of BACKENDS.
    """
    os.environ.update(environment)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(1)
    configure_logging("trainer", "text")
    BACKENDS[backend]()
    PROGRESS.place = f"llm stage {rank()}"
    try:
        with watched(hang_timeout_s) as watch, process_group(torch.device("cpu"), watch, alone=True):
            if fault == HELD_AT_ITS_END and rank() == faulty_rank and watch is not None:
                threading.Thread(target=_stop_once_done, args=(watch.channel,), daemon=True).start()
            _train(FAULTS[fault] if rank() == faulty_rank else FAULTS["none"])
    except HeadraceError as err:
        print(f"headrace train: {err}", file=sys.stderr)
        sys.exit(2 if isinstance(err, UserError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


def _train(fault: Callable[[], None]) -> None:
    for step in range(STEPS):
        PROGRESS.begin_step(step)
        if step == FAULTY_STEP:
            fault()
        total = torch.ones(())
        dist.all_reduce(total)
        assert total == dist.get_world_size()
