"""What `headrace train` says of a folder of checkpoints before it trains."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.cli.run.checkpoint_folders import check_to_resume, check_to_save
from headrace.errors import UserError
from headrace.trainer.pipeline.checkpoint_files import TRAINING_RECORD, TensorKey, step_folder, write


def save(folder: Path, step: int, of: int = 1, **loader: Any) -> Path:
    """A checkpoint, of `of` ranks the first one's file; that file."""
    write(folder, step, 0, of, loader, {TensorKey(name="layer.weight", kind="weight"): torch.zeros(4)})
    return step_folder(folder, step) / f"0-of-{of}.arrow"


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def test_a_folder_to_save_in_is_made_and_left_empty(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    check_to_save(folder)
    assert list(folder.iterdir()) == []
    check_to_save(folder)


def test_a_place_where_nothing_can_be_saved_is_refused_before_training(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text("")
    for place in (file, file / "within", Path("/proc/nowhere")):
        with pytest.raises(UserError, match=f"--checkpoint {place} is no folder to save in .*: name one that this process may"):
            check_to_save(place)


@pytest.mark.parametrize(
    ("check", "sentence"),
    [
        (check_to_save, "is no folder to save in (File name too long): name one that this process may make, read and write"),
        (check_to_resume, "cannot be read (File name too long): let this process read all of it"),
    ],
)
def test_a_place_that_the_system_will_not_even_look_at_is_refused_in_its_words(tmp_path: Path, check, sentence: str) -> None:
    """As below a folder that this process may not enter, which an administrator's never meets."""
    with pytest.raises(UserError, match=re.escape(sentence)):
        check(tmp_path / ("x" * 300))


@pytest.mark.parametrize("check", [check_to_save, check_to_resume])
@pytest.mark.parametrize("name", ["step-00000003.old", "step-3"])
def test_what_is_nearly_named_like_a_checkpoint_is_not_taken_for_one(tmp_path: Path, check, name: str) -> None:
    save(tmp_path, 3).parent.rename(tmp_path / name)
    with pytest.raises(UserError, match=rf"has {re.escape(name)}, which is no checkpoint's name: move it elsewhere"):
        check(tmp_path)


def test_a_folder_with_a_whole_checkpoint_is_taken_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "step-by-step").mkdir()
    check_to_resume(tmp_path)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda _: None, "does not exist: name the folder that --checkpoint wrote to"),
        (lambda folder: folder.write_text(""), "is no folder: name the folder that --checkpoint wrote to"),
        (lambda folder: folder.mkdir(), "has no checkpoint: name the folder that --checkpoint wrote to"),
        (lambda folder: save(folder, 3, of=2), "has step-00000003, but not all of it: a file is missing or cut off"),
        (lambda folder: cut(save(folder, 3), -100), "has step-00000003, but not all of it: a file is missing or cut off"),
        (lambda folder: cut(save(folder, 3), 0), "has step-00000003, but not all of it: a file is missing or cut off"),
    ],
    ids=["missing", "file", "empty", "a rank's file missing", "cut off", "of no byte"],
)
def test_a_folder_without_a_whole_checkpoint_is_refused(tmp_path: Path, make, sentence: str) -> None:
    make(folder := tmp_path / "folder")
    with pytest.raises(UserError, match=f"--resume {folder} {sentence}"):
        check_to_resume(folder)


def test_an_older_checkpoint_is_taken_for_one_that_is_not_whole_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 2)
    cut(save(tmp_path, 3), -100)
    with caplog.at_level(logging.WARNING):
        check_to_resume(tmp_path)
    assert "newest=step-00000003 taken=step-00000002" in caplog.text


def test_a_folder_that_is_saved_to_as_well_needs_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_to_resume(tmp_path, is_saved_to=True)
    assert not caplog.messages


def test_that_no_checkpoint_of_it_is_whole_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 3, of=2)
    check_to_resume(tmp_path, is_saved_to=True)
    assert "no checkpoint is whole, and what there is will be removed" in caplog.text
    assert "newest=step-00000003" in caplog.text


def test_a_checkpoint_of_another_job_or_model_is_refused_before_the_job_goes_back_to_it(tmp_path: Path) -> None:
    save(tmp_path, 3, job="first", **{TRAINING_RECORD: {"model": "tiny"}})
    check_to_resume(tmp_path, job="first", model="tiny")
    check_to_resume(tmp_path)
    with pytest.raises(
        UserError, match=r"has checkpoints of job 'first', and this is job 'second': name the folder that 'second'"
    ):
        check_to_resume(tmp_path, job="second", model="tiny")
    with pytest.raises(
        UserError, match=r"has checkpoints of the model tiny, and small is to be trained: say --model tiny, or name"
    ):
        check_to_resume(tmp_path, job="first", model="small")


def test_a_checkpoint_of_a_release_that_did_not_note_the_model_is_taken(tmp_path: Path) -> None:
    save(tmp_path, 3, job="first")
    check_to_resume(tmp_path, job="first", model="small")
