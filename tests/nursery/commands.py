"""A nursery of `headrace` commands, which has imported all that they import: `python -m tests.nursery.commands`."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from torch import nn

from headrace.cli import main as command
from headrace.preprocessor.image import resample
from headrace.trainer.train_step import make_optimizer
from tests.nursery import kernels
from tests.nursery.forked_commands import HOOK
from tests.nursery.forking import leave, serve

LATER = (
    "headrace.cli.run.node_processes",
    "headrace.cli.run.serve",
    "headrace.cli.watch.submission",
    "headrace.cli.watch.summary",
    "headrace.jobs_client",
    "headrace.observability.metrics",
    "headrace.observability.tracing",
    "headrace.preprocessor.audio.features",
    "headrace.preprocessor.server",
    "headrace.reorder_service.page.page_server",
    "headrace.reorder_service.server",
    "headrace.trainer.loading.relay",
    "headrace.trainer.models.huggingface.model",
    "headrace.trainer.orchestrated.fsdp_training",
    "headrace.trainer.pipeline.pipeline_training",
    "headrace.trainer.recovery.node",
    "headrace.trainer.train",
)
"""What commands import when they come to it."""


def load() -> None:
    """Import what any command may, and load all that is compiled but the planner. No thread is begun by it."""
    for module, _ in command.COMMANDS.values():
        import_module(f"headrace.cli.{module}")
    for name in LATER:
        import_module(name)
    resample.warm_up()
    make_optimizer(nn.Linear(1, 1).parameters())  # imports as much as everything else


def prepare() -> None:
    """Be ready to fork commands."""
    load()
    kernels.warm_up_once()
    kernels.warm_up()


def run(arguments: Sequence[str], folder: str, log: str, environment: Mapping[str, str], errors: str = "") -> int:
    """In a fork: be that command, in that folder. errors: a file for what it writes to stderr; none: `log`."""
    leave(Path(log), Path(errors) if errors else None)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]  # as PYTHONUNBUFFERED has it
    if hook := environment.get(HOOK):
        runpy.run_path(hook)
    return command.main([*arguments])


if __name__ == "__main__":
    prepare()
    sys.exit(serve(run))
