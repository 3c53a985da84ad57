"""The command line that the loops of this folder share. It imports no library that some of them do without."""

from __future__ import annotations

import argparse
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    """Return the options of the command line. The number of steps and of microbatches is that of the job."""
    options = argparse.ArgumentParser()
    options.add_argument("--endpoint", required=True, metavar="HOST:PORT", help="of the reorder service")
    options.add_argument("--job", required=True, help="name of a job that was submitted")
    options.add_argument("--steps", type=int, default=20, help="optimizer steps (default %(default)s)")
    options.add_argument("--microbatches", type=int, default=2, help="microbatches of a step and rank (default %(default)s)")
    options.add_argument(
        "--checkpoints", type=Path, required=True, help="folder of checkpoints: of the newest one training goes on"
    )
    options.add_argument("--every", type=int, default=5, help="steps from checkpoint to checkpoint (default %(default)s)")
    return options


def arguments() -> argparse.Namespace:
    """Return the values of the command line's options."""
    return parser().parse_args()
