"""Forks the nodes of a case: `python -m tests.chaos_trainer.nursery`. It has imported what takes a node seconds.

Each line on stdin is a JSON value: {"number", "node", "arguments" of `headrace train`, "folder", "leader", "faults"}. It says
{"number", "pid"} for each on stdout, and later {"pid", "code"}: its exit code, or minus the signal that ended it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from headrace import jobs_client
from headrace.cli import main as command
from headrace.cli.run import node_processes
from headrace.cli.watch import submission, summary
from headrace.observability import metrics, tracing
from headrace.trainer.models.huggingface import model as adapted
from headrace.trainer.pipeline import pipeline_training
from headrace.trainer.recovery import node
from headrace.trainer.train_step import make_optimizer
from tests.chaos_trainer.faults import Fault
from tests.chaos_trainer.strike import Strikes, install

LATER = (jobs_client, node_processes, adapted, submission, summary, metrics, tracing, pipeline_training, node)
"""What `headrace train` imports when it comes to it."""
POLL_S = 0.02
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def main() -> int:
    """Until stdin ends. No thread runs here: a fork has all of the process."""
    for module, _ in command.COMMANDS.values():
        import_module(f"headrace.cli.{module}")
    make_optimizer(nn.Linear(1, 1).parameters())  # imports as much as everything else
    gc.freeze()
    said = b""
    while True:
        if select.select([0], [], [], POLL_S)[0]:
            chunk = os.read(0, 1 << 16)
            if not chunk:
                return 0
            *lines, said = (said + chunk).split(b"\n")
            for line in lines:
                order = json.loads(line)
                number = order.pop("number")
                pid = os.fork()
                if not pid:
                    return _run(**order)
                _say(number=number, pid=pid)
        _bury()


def _bury() -> None:
    """Tell of all nodes that have ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        _say(pid=pid, code=os.waitstatus_to_exitcode(status))


def _say(**message: Any) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


class _Forked:
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


def _run(node: str, arguments: list[str], folder: str, leader: int, faults: list[dict[str, Any]]) -> int:
    """In the child: a process that is a node, or that forks the processes of one."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    os.setsid()
    descriptor = os.open(Path(folder, f"{node}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.register(signal.SIGUSR1)  # where all its threads are, in its log
    strikes = Strikes(node, [Fault.of_dict(fault) for fault in faults], Path(folder), leader)

    def start_process(arguments: Sequence[str], environment: Mapping[str, str]) -> _Forked:
        if pid := os.fork():
            return _Forked(pid)
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # it was told to pass it on
        os.environ.update(environment)
        code = command.main([*arguments])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    node_processes.start_process = start_process  # type: ignore[assignment]
    install(strikes)
    code = command.main(["train", *arguments])
    if faults:  # at once: to tear down all that the nursery has imported takes longer than a step. Undisturbed nodes do it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
