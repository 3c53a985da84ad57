"""`headrace train`, whose rank FAULTY_RANK has a FAULT in the middle of step 1: python -m tests.integration.faulty_trainer.

The fault is in a hook of torch's on every module's forward, so that Headrace's own code runs as it is.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from torch.nn.modules.module import register_module_forward_hook

from headrace.cli.main import main
from headrace.errors import UserError
from headrace.trainer.rank_progress import PROGRESS

FAULTY_STEP = 1


def _raise(error: Exception) -> None:
    raise error


FAULTS = {
    "user error": lambda: _raise(UserError("the batch has no samples: take a larger one")),
    "unexpected": lambda: _raise(ZeroDivisionError("division by zero")),
    "hang": lambda: time.sleep(1000),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def _in_forward(*_: object) -> None:
    if PROGRESS.report().step == FAULTY_STEP:
        FAULTS[os.environ["FAULT"]]()


if __name__ == "__main__":
    if os.environ["RANK"] == os.environ["FAULTY_RANK"]:
        register_module_forward_hook(_in_forward)
    sys.exit(main())
