"""Where in its job a run begins: at a checkpoint, at the first step, or behind the last commit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Protocol

from headrace.observability.logs import pairs
from headrace.trainer.loading.loader_state import LoaderState
from headrace.trainer.pipeline.checkpoint_files import Checkpoint, complete_steps

log = logging.getLogger(__name__)


class Restorable(Protocol):
    """Protocol of what feeds a rank, such as a `PlacesLoader`."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def begin_from(resume: Path | None, checkpoint: Path | None, job: str, loader: Restorable) -> Checkpoint | None:
    """Take a loader that is not open yet to where training begins, and return the checkpoint with the weights to begin with.

    `resume`: folder of checkpoints; None: the job goes on behind its last commit. Where it is also the folder that this run saves
    to (`checkpoint`), and has no complete checkpoint yet, the job begins anew: what was committed before the first one could be
    saved is undone. Raises UserError if any other folder has none.
    """
    if resume is None:
        return None
    if resume == checkpoint and not complete_steps(resume):
        log.info("no checkpoint yet: the job begins at its first step %s", pairs(job=job, folder=resume))
        loader.load_state_dict(LoaderState(job=job, step=0).to_dict())
        return None
    begin = Checkpoint.newest(resume)
    loader.load_state_dict(begin.loader)
    return begin
