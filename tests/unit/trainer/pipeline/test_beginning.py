"""Where a run begins that is started again, of which only part is a question of files and numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import UserError
from headrace.trainer.pipeline.beginning import check_to_begin_anew, goes_on


def test_a_folder_is_the_same_by_whatever_path(tmp_path: Path) -> None:
    (folder := tmp_path / "checkpoints").mkdir()
    (other := tmp_path / "link").symlink_to(folder)
    assert goes_on(folder, other)
    assert goes_on(tmp_path / "missing", tmp_path / "missing")
    assert not goes_on(folder, tmp_path)
    assert not goes_on(folder, None)
    assert not goes_on(None, folder)
    assert not goes_on(tmp_path / "missing", folder)


def test_a_job_begins_anew_only_while_its_first_checkpoint_may_not_be_there() -> None:
    """The checkpoint of step 100 is awaited when that of step 200 is saved, behind the commit of these steps."""
    check_to_begin_anew(Path("checkpoints"), "mine", committed_steps=200, every=100)
    with pytest.raises(UserError, match=r"no whole checkpoint, but job 'mine' has committed 201 steps, .*: name the folder that"):
        check_to_begin_anew(Path("checkpoints"), "mine", committed_steps=201, every=100)
