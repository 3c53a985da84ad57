"""`headrace train` of six ranks, of which rank 3 has a fault in the middle of step 1, after a line that says when.

`python -m tests.integration.faulty_trainer` is one of the ranks, with its fault in the variable FAULT. The fault is in a hook of
torch's on every module's forward, so that Headrace's own code runs as it is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml
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
_FAULTY_STEP = 1


def _raise(error: Exception) -> None:
    raise error


FAULTS = {
    "user error": lambda: _raise(UserError("the batch has no samples: take a larger one")),
    "unexpected": lambda: _raise(ZeroDivisionError("division by zero")),
    "hang": lambda: time.sleep(1000),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def start_ranks(endpoint: str, job: str, folder: Path, fault: str, hang_timeout_s: int) -> list[subprocess.Popen[bytes]]:
    """Start all ranks, each with its output in `RANK.log` in the folder."""
    (folder / "topology.yaml").write_text(yaml.safe_dump({"units": UNITS}))
    module = "tests.integration.faulty_trainer"
    options = ["--topology", str(folder / "topology.yaml"), "--hang-timeout", str(hang_timeout_s), "--threads", "1"]
    command = [sys.executable, "-m", module, "train", "--endpoint", endpoint, "--job", job, *options]
    processes = []
    for rank, environment in enumerate(torchrun_environments(NUM_RANKS)):
        with (folder / f"{rank}.log").open("wb") as out:
            environment = {**os.environ, **environment, "FAULT": fault}
            processes.append(subprocess.Popen(command, stdout=out, stderr=out, env=environment))
    return processes


def _in_forward(*_: object) -> None:
    if PROGRESS.report().step == _FAULTY_STEP:
        print(f"{FAULT_AT}{time.time()}", flush=True)
        FAULTS[os.environ["FAULT"]]()


if __name__ == "__main__":
    if os.environ["RANK"] == str(FAULTY_RANK):
        register_module_forward_hook(_in_forward)
    sys.exit(main())
