"""The processes of a node of a recoverable job: started by one command, and ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from headrace.child_process import how_ended, with_parent_death_signal
from headrace.cli.run.processors import shares
from headrace.errors import UserError
from headrace.launcher_variables import local_num_ranks, local_rank
from headrace.spec import read_yaml

POLL_S = 0.05
LOSS_S = 3.0  # how long processes that have lost a sibling may take to hear it from the service, and to say so in their log
END_S = 30.0  # how long after the first one has ended well the others may take to do so too
STOP_S = 3.0  # from SIGINT or SIGTERM to SIGKILL


def processes_in(nodes: Path) -> int:
    """Return how many processes a node has by the nodes' spec, whose other fields take torch to check. Raises SpecError."""
    document = read_yaml(nodes, "nodes")
    found = document.get("gpus_per_node") if isinstance(document, dict) else None
    return found if isinstance(found, int) else 1


def own_process(gpus_per_node: int) -> int | None:
    """Return which process of a node this is: its LOCAL_RANK if anything has started it as one. None: it starts them itself.

    Raises UserError where a launcher has started another number of processes on this host than a node has.
    """
    if gpus_per_node == 1:
        return 0
    if "LOCAL_RANK" not in os.environ:
        return None
    number, count = local_rank(), local_num_ranks() if "LOCAL_WORLD_SIZE" in os.environ else gpus_per_node
    if count != gpus_per_node or number >= count:
        raise UserError(
            f"process {number} of {count} on this host, but the nodes' spec has gpus_per_node {gpus_per_node}: start as many, or "
            "none, as `headrace train --nodes` starts them itself where LOCAL_RANK is not set"
        )
    return number


def run_node(arguments: Sequence[str], node: str, num_processes: int) -> int:
    """Run all processes of a node to their end, and return the exit code.

    arguments: of `headrace` for each of them. node: the node's name. Where one fails, or is killed, the others end too. SIGTERM
    has the node leave at the end of a step. Ctrl-C ends all; nothing is left behind, even if this process is killed.
    """
    relay = os.environ.get("HEADRACE_RELAY", "0")  # by default none: a process that hangs holds up the plans of no other
    common = {"LOCAL_WORLD_SIZE": str(num_processes), "HEADRACE_RELAY": relay, **shares(num_processes)}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with _passing_on_sigterm(processes):
            for number in range(num_processes):
                process = start_process([*arguments, "--node", node], {"LOCAL_RANK": str(number), **common})
                processes.append(process)
            return _follow(processes, node)
    finally:
        former = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave any process behind
        _signal(processes, signal.SIGINT)
        _await_end(processes, STOP_S)
        _signal(processes, signal.SIGKILL)
        for process in processes:
            process.wait()
        signal.signal(signal.SIGINT, former)


def start_process(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start one process of a node, which says what it has to say where this one does, and dies with it."""
    return subprocess.Popen(
        with_parent_death_signal([sys.executable, "-m", "headrace.cli", *arguments], signal.SIGKILL),
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
        start_new_session=True,  # Ctrl-C in the terminal reaches this process only, which ends its children in order
    )


def _follow(processes: Sequence[subprocess.Popen[bytes]], node: str) -> int:
    """Wait until one process has ended, and for a while until all have. Return the exit code; 1 if a signal has ended one."""
    while (first := next((number for number, process in enumerate(processes) if process.poll() is not None), None)) is None:
        time.sleep(POLL_S)
    code = processes[first].returncode
    if code:
        how = how_ended(code)
        print(f"headrace train: process {first} of node {node} {how}: the others end with it", file=sys.stderr, flush=True)
    _await_end(processes, LOSS_S if code else END_S)
    failed = [process.returncode for process in (processes[first], *processes) if process.returncode]
    return max(1, failed[0]) if failed else 0


def _await_end(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Wait until all processes have ended, or for `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)


def _signal(processes: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in processes:
        process.send_signal(number)  # nothing happens to one that has ended


@contextmanager
def _passing_on_sigterm(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    def leave(_: int, __: FrameType | None) -> None:
        _signal(processes, signal.SIGTERM)

    former = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
