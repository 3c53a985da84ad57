"""`headrace train` of several ranks, of which one has a fault in the middle of step 1, after a line that says when.

`python -m tests.integration.faulty_trainer` is that rank, with its fault in the variable FAULT, or another. It is in a hook of
torch's on every module's forward, so that Headrace's own code runs as it is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import yaml
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from headrace.cli.main import main
from headrace.errors import UserError
from headrace.processes import torchrun_environments
from headrace.trainer.rank_progress import PROGRESS

NUM_RANKS = 6
UNITS = {"vision": {}, "audio": {}, "llm": {"dp": 2, "pp": 2}}
PLANNED = {"replicas": 2, "microbatches": 2, "stages": {"vision": 1, "audio": 1, "llm": 2}}
"""The topology of a spec whose job these ranks can train."""
FAULTY_RANK = 3
FAULT_AT = "fault at "
"""What the faulty rank prints before the time, in seconds of `time.time`."""
WHERE = "rank 3 (llm replica 0, stage 1, slice 0)"
_FAULTY_STEP = 1
DRIFT = "drift"
"""The fault of a memory that has other weights than it was given."""
_flipped = False


def _raise(error: Exception) -> None:
    raise error


def _flip_a_bit(module: nn.Module) -> None:
    global _flipped
    for weight in [] if _flipped else module.parameters():
        weight.data.view(torch.int32)[..., 0] ^= 1
        _flipped = True


FAULTS = {
    "user error": lambda: _raise(UserError("the batch has no samples: take a larger one")),
    "unexpected": lambda: _raise(ZeroDivisionError("division by zero")),
    "hang": lambda: time.sleep(1000),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


REASONS = {
    "user error": f"{WHERE}: step {_FAULTY_STEP}: the batch has no samples: take a larger one",
    "unexpected": f"{WHERE}: step {_FAULTY_STEP}: ZeroDivisionError('division by zero')",
    "hang": f"no rank has got on for 5 s (--hang-timeout): {WHERE} at step {_FAULTY_STEP}",
    "stop": f"{WHERE} has said nothing for",
    "kill": f"{WHERE} has said nothing for",
}
"""What the log of each other rank says of a fault, with a hang timeout of 5 s."""


def start_ranks(endpoint: str, job: str, folder: Path, fault: str, hang_timeout_s: int) -> list[subprocess.Popen[bytes]]:
    """Start all ranks of the pipeline, each with its output in `RANK.log` in the folder."""
    (folder / "topology.yaml").write_text(yaml.safe_dump({"units": UNITS}))
    options = ["--topology", str(folder / "topology.yaml"), "--hang-timeout", str(hang_timeout_s)]
    return _start(endpoint, job, folder, options, NUM_RANKS, {str(FAULTY_RANK): fault})


def start_replicas(endpoint: str, job: str, folder: Path) -> list[subprocess.Popen[bytes]]:
    """Start two whole replicas, of which the second one's weights drift, and which are compared after every two steps."""
    (folder / "optimizer.yaml").write_text(yaml.safe_dump({"optimizer": {"check_replicas_every": 2}}))
    return _start(endpoint, job, folder, ["--optimizer", str(folder / "optimizer.yaml")], 2, {"1": DRIFT})


def _start(
    endpoint: str, job: str, folder: Path, options: list[str], num_ranks: int, faults: dict[str, str]
) -> list[subprocess.Popen[bytes]]:
    module = "tests.integration.faulty_trainer"
    command = [sys.executable, "-m", module, "train", "--endpoint", endpoint, "--job", job, "--threads", "1", *options]
    processes = []
    for rank, environment in enumerate(torchrun_environments(num_ranks)):
        with (folder / f"{rank}.log").open("wb") as out:
            environment = {**os.environ, **environment, "FAULT": faults.get(str(rank), "")}
            processes.append(subprocess.Popen(command, stdout=out, stderr=out, env=environment))
    return processes


def _in_forward(module: nn.Module, *_: object) -> None:
    if PROGRESS.report().step == _FAULTY_STEP:
        print(f"{FAULT_AT}{time.time()}", flush=True)
        if os.environ["FAULT"] == DRIFT:
            _flip_a_bit(module)
        else:
            FAULTS[os.environ["FAULT"]]()


if __name__ == "__main__":
    if os.environ["FAULT"]:
        register_module_forward_hook(_in_forward)
    sys.exit(main())
