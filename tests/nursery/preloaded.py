"""Imported by the server that forks what multiprocessing starts: what such processes need of torch, once for all of them.

As in `forking`, no later search for garbage looks at what is shared, which would copy it into each process.
"""

from __future__ import annotations

import gc

from torch import nn

import tests.verify.context_processes
import tests.verify.fsdp_processes
import tests.verify.processes  # noqa: F401  # what most of these processes run
from headrace.trainer.train_step import make_optimizer

make_optimizer(nn.Linear(1, 1).parameters())  # imports as much as everything else
gc.collect()
gc.freeze()
