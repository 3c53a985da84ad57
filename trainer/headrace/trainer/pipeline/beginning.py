"""Where in its job a run begins: at a checkpoint, at the first step, or behind the last commit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Protocol

from headrace.errors import UserError
from headrace.jobs_client import JobsClient
from headrace.observability.logs import pairs
from headrace.trainer.loading.loader_state import LoaderState
from headrace.trainer.pipeline.checkpoint_files import Checkpoint, complete_steps
from headrace.trainer.rank_watch import RankWatch
from headrace.trainer.starting import rank

log = logging.getLogger(__name__)

_FIRST_STEP = "first step"  # the key in the ranks' store: where rank 0 begins


class Restorable(Protocol):
    """Protocol of what feeds a rank, such as a `PlacesLoader`."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def goes_on(resume: Path | None, checkpoint: Path | None) -> bool:
    """Return whether a run saves to the folder that it resumes from."""
    if resume is None or checkpoint is None:
        return False
    return resume == checkpoint or (resume.exists() and checkpoint.exists() and resume.samefile(checkpoint))


def begin_from(
    endpoint: str,
    job: str,
    loader: Restorable,
    *,
    resume: Path | None,
    checkpoint: Path | None,
    every: int,
    watch: RankWatch | None,
) -> Checkpoint | None:
    """Take a loader that is not open yet to where training begins, and return the checkpoint with the weights to begin with.

    `resume`: folder of checkpoints; None: the job goes on behind its last commit. Where it is also the folder that this run saves
    to (`checkpoint`), and has no complete checkpoint yet, the job begins anew: what was committed before the first one was saved
    is undone. `every`: steps between checkpoints. `watch`: of the ranks, None where there is one.

    Raises UserError if any other folder has no complete checkpoint, if the job has committed too much for this one to have none
    (`check_to_begin_anew`), and if rank 0 finds another checkpoint than this rank. Until then the job stays as it is.
    """
    if resume is None:
        return None
    is_new = goes_on(resume, checkpoint) and not complete_steps(resume)
    begin = None if is_new else Checkpoint.newest(resume)
    step = 0 if begin is None else begin.step
    if rank() == 0 and begin is None:
        with JobsClient(endpoint) as client:
            committed_steps = client.show(job).committed_steps
        check_to_begin_anew(resume, job, committed_steps, every)
        log.warning("no checkpoint yet: the job begins anew %s", pairs(job=job, undone_steps=committed_steps, folder=resume))
    if watch is not None:
        _check_as_rank_0(step, resume, watch)
    loader.load_state_dict(LoaderState(job=job, step=0).to_dict() if begin is None else begin.loader)
    return begin


def check_to_begin_anew(folder: Path, job: str, committed_steps: int, every: int) -> None:
    """Check that a job may begin at step 0, as the folder that it is resumed from and saved to has no complete checkpoint.

    Raises UserError where it has committed so many steps, with a checkpoint each `every`, that the folder must have had one. A
    checkpoint is awaited when the next one is saved, so that two times `every` steps may be committed without any.
    """
    if committed_steps > 2 * every:
        raise UserError(
            f"--resume {folder} has no whole checkpoint, but job {job!r} has committed {committed_steps} steps, with "
            f"--checkpoint-every {every}: name the folder that earlier runs saved to, or train anew after "
            f"`headrace job reset {job} --step 0`"
        )


def _check_as_rank_0(step: int, folder: Path, watch: RankWatch) -> None:
    """Raise UserError unless rank 0 begins at the same step; waits for it to have said so."""
    store = watch.channel.store()
    if rank() == 0:
        store.set(_FIRST_STEP, str(step))
    elif (first := int(store.get(_FIRST_STEP))) != step:
        raise UserError(
            f"--resume {folder} has {step or 'no'} steps in its newest whole checkpoint here, and {first or 'none'} for rank 0: "
            "let all ranks see the same folder"
        )
