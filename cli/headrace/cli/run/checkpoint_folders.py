"""Folders of checkpoints as `headrace train` is given them: what is wrong with one is said before anything is submitted."""

from __future__ import annotations

import logging
import os
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path

from headrace.errors import UserError
from headrace.observability.logs import pairs

log = logging.getLogger(__name__)


def check_to_save(folder: Path) -> None:
    """Make a folder to save checkpoints in.

    Raises UserError where that cannot be, nothing can be written there, or something else has nearly a checkpoint's name. A write
    that fails later is only logged, as training is worth more than a checkpoint of it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        _check_names("--checkpoint", folder)
    except OSError as err:
        why = "a file" if isinstance(err, FileExistsError) else err.strerror
        raise UserError(
            f"--checkpoint {folder} is no folder to save in ({why}): name one that this process may make, read and write"
        ) from err


def check_to_resume(folder: Path, *, is_saved_to: bool = False, job: str | None = None, model: str | None = None) -> None:
    """Raise UserError where a folder has no checkpoint to go on from; log where its newest one is not whole, and an older is.

    is_saved_to: whether it is the folder that the run saves to, which needs no checkpoint: without one training begins anew.
    job, model: what is trained, where a checkpoint of anything else is refused, before the job goes back to its step; None: any.
    """
    from headrace.trainer.pipeline.checkpoint_files import TRAINING_RECORD, Checkpoint, complete_steps, step_folder

    try:
        _check_names("--resume", folder)
        complete = complete_steps(folder)
    except (FileNotFoundError, NotADirectoryError) as err:
        what = "does not exist" if isinstance(err, FileNotFoundError) else "is no folder"
        raise UserError(f"--resume {folder} {what}: name the folder that --checkpoint wrote to") from err
    except OSError as err:
        raise UserError(f"--resume {folder} cannot be read ({err.strerror}): let this process read all of it") from err
    newest = max((path.name for path in folder.glob("step-[0-9]*")), default="")
    if is_saved_to and not complete:
        if newest:
            log.warning("no checkpoint is whole, and what there is will be removed %s", pairs(folder=folder, newest=newest))
        return
    if not complete:
        raise UserError(
            f"--resume {folder} has {newest}, but not all of it: a file is missing or cut off; name a folder with a whole one"
            if newest
            else f"--resume {folder} has no checkpoint: name the folder that --checkpoint wrote to"
        )
    whole = step_folder(folder, complete[-1]).name
    if newest > whole:
        log.warning("the newest checkpoint is not whole, and an older one is taken %s", pairs(newest=newest, taken=whole))
    saved = Checkpoint(folder, complete[-1]).loader
    if job is not None and saved.get("job", job) != job:
        raise UserError(
            f"--resume {folder} has checkpoints of job {saved['job']!r}, and this is job {job!r}: name the folder that {job!r} "
            "was saved to"
        )
    saved_model = saved.get(TRAINING_RECORD, {}).get("model", model)
    if model is not None and saved_model != model:
        raise UserError(
            f"--resume {folder} has checkpoints of the model {saved_model}, and {model} is to be trained: say --model "
            f"{saved_model}, or name the folder of a run of {model}"
        )


def _check_names(option: str, folder: Path) -> None:
    """Raise UserError for what is nearly named like a checkpoint, as step-00000003.old or step-3: it would be taken for one.

    Raises OSError where the folder cannot be read, which `glob` would pass over.
    """
    from headrace.trainer.pipeline.checkpoint_files import step_folder

    for name in sorted(os.listdir(folder)):
        number = name.removeprefix("step-")
        is_one = number.isdecimal() and name == step_folder(folder, int(number)).name
        if fnmatchcase(name, "step-[0-9]*") and not is_one:
            raise UserError(f"{option} {folder} has {name}, which is no checkpoint's name: move it elsewhere")
