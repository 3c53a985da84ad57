"""Forks the nodes of a case, with the faults that may strike them, and services: `python -m tests.chaos_trainer.node_nursery`."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.cli import main as command
from headrace.cli.run import node_processes
from tests.chaos_trainer.faults import Fault
from tests.chaos_trainer.strike import Strikes, install
from tests.nursery import commands
from tests.nursery.commands import prepare
from tests.nursery.forking import POLL_S, die_with_parent, leave, serve

TORN_DOWN = ("n0", "n1")
"""Undisturbed nodes that end as a user's do, of an encoder and of an LLM: they free all that the nursery has imported, which
takes longer than a step."""


class _Process:
    """A process of a node, in place of what `headrace train` starts, which would import for seconds."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(found[1])
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(POLL_S)


def run(**order: Any) -> int:
    """In the child: a node, or a service as a nursery of commands has it."""
    return _node(**order) if "node" in order else commands.run(**order)


def _node(
    node: str, arguments: list[str], folder: str, leader: int, faults: list[dict[str, Any]], environment: dict[str, str]
) -> int:
    """A process that is a node, or that forks the processes of one."""
    leave(Path(folder, f"{node}.log"))
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.register(signal.SIGUSR1)  # where all its threads are, in its log
    strikes = Strikes(node, [Fault.of_dict(fault) for fault in faults], Path(folder), leader)

    def start_process(arguments: Sequence[str], environment: Mapping[str, str]) -> _Process:
        if pid := os.fork():
            return _Process(pid)
        die_with_parent()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # it was told to pass it on
        os.environ.update(environment)
        code = command.main([*arguments])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    node_processes.start_process = start_process  # type: ignore[assignment]
    install(strikes)
    code = command.main(["train", *arguments])
    if not faults and node in TORN_DOWN:
        sys.exit(code)
    return code


if __name__ == "__main__":
    prepare()
    sys.exit(serve(run))
