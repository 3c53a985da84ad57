"""The abort of this process's communicators, which ends waits in them that do not end by themselves."""

from __future__ import annotations

import threading

import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

_ONE_AT_A_TIME = threading.Lock()


def abort_communicators() -> threading.Thread:
    """Abort the communicators of all groups of `torch.distributed`. Return the thread that does it, as an abort may wait, too.

    Whoever waits in one of NCCL's then gets an error. Where another thread has aborted them, nothing is left to do. Those of gloo
    cannot be aborted: the groups are left as they are, and waits end with the process.
    """
    thread = threading.Thread(target=_abort, name="abort", daemon=True)
    thread.start()
    return thread


def _abort() -> None:
    with _ONE_AT_A_TIME:
        if dist.is_initialized() and dist.get_backend() != dist.Backend.GLOO:
            _abort_process_group()
