"""Which checkpoints count, which are kept, and what is read from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.errors import UserError
from headrace.trainer.pipeline.checkpoint_files import (
    Checkpoint,
    TensorKey,
    attempt_folder,
    complete_steps,
    prune,
    publish,
    remove_incomplete,
    step_folder,
    write,
)

KEY = TensorKey(name="layer.weight", kind="weight")
WHOLE = torch.arange(24.0).view(4, 6)


def slice_key(dim: int, index: int, count: int) -> TensorKey:
    return TensorKey(name=KEY.name, kind=KEY.kind, dim=dim, index=index, count=count)


def save(folder: Path, step: int, *ranks: int, of: int, tensors: dict[TensorKey, Tensor] | None = None) -> None:
    for rank in ranks:
        write(folder, step, rank, of, {"job": "some", "step": step}, tensors or {KEY: WHOLE})


def test_what_was_written_is_read(tmp_path: Path) -> None:
    count = TensorKey(name=KEY.name, kind="step")
    save(tmp_path, 7, 0, of=1, tensors={KEY: WHOLE, count: torch.tensor(7.0)})
    checkpoint = Checkpoint.newest(tmp_path)
    assert (checkpoint.step, checkpoint.loader) == (7, {"job": "some", "step": 7})
    assert torch.equal(checkpoint.read(KEY, (4, 6)), WHOLE)
    assert torch.equal(checkpoint.read(count, ()), torch.tensor(7.0))


@pytest.mark.parametrize("dim", [0, 1])
def test_slices_are_put_together_and_cut_anew(tmp_path: Path, dim: int) -> None:
    for index, own in enumerate(WHOLE.chunk(2, dim)):
        save(tmp_path, 1, index, of=2, tensors={slice_key(dim, index, 2): own.contiguous()})
    checkpoint = Checkpoint.newest(tmp_path)
    assert torch.equal(checkpoint.read(KEY, WHOLE.shape), WHOLE)
    for other, count in ((0, 4), (1, 3), (0, 3), (1, 4)):  # the last two cannot be cut equally
        for index, expected in enumerate(WHOLE.tensor_split(count, other)):
            assert torch.equal(checkpoint.read(slice_key(other, index, count), expected.shape), expected)


def test_an_attempt_takes_the_place_of_a_former_checkpoint_when_it_is_published(tmp_path: Path) -> None:
    save(tmp_path, 1, 0, 1, of=2)
    save(attempt_folder(tmp_path, 3), 1, 0, of=2)  # one was lost then
    save(attempt_folder(tmp_path, 4), 1, 0, of=1, tensors={KEY: -WHOLE})
    assert complete_steps(tmp_path) == [1]
    publish(tmp_path, 4, 1)
    assert torch.equal(Checkpoint.newest(tmp_path).read(KEY, WHOLE.shape), -WHOLE)
    assert [path.name for path in tmp_path.iterdir()] == [step_folder(tmp_path, 1).name]


def test_an_attempt_that_others_have_given_up_leaves_their_checkpoint_as_it_is(tmp_path: Path) -> None:
    save(attempt_folder(tmp_path, 4), 1, 0, of=1)
    publish(tmp_path, 4, 1)
    with pytest.raises(FileNotFoundError):
        publish(tmp_path, 3, 1)
    assert torch.equal(Checkpoint.newest(tmp_path).read(KEY, WHOLE.shape), WHOLE)


def test_a_checkpoint_counts_when_all_processes_have_written(tmp_path: Path) -> None:
    save(tmp_path, 1, 0, 1, 2, of=3)
    save(tmp_path, 2, 0, 2, of=3)
    assert complete_steps(tmp_path) == [1]
    save(tmp_path, 2, 1, of=3)
    assert complete_steps(tmp_path) == [1, 2]


def test_a_file_that_was_cut_off_does_not_count(tmp_path: Path) -> None:
    save(tmp_path, 1, 0, of=1)
    save(tmp_path, 2, 0, of=1)
    torn = step_folder(tmp_path, 2) / "0-of-1.arrow"
    torn.write_bytes(torn.read_bytes()[:-100])
    assert Checkpoint.newest(tmp_path).step == 1


def test_a_process_that_died_while_it_wrote_leaves_none(tmp_path: Path) -> None:
    save(tmp_path, 1, 0, of=2)
    (step_folder(tmp_path, 1) / "1-of-2.growing").write_bytes(b"half")
    with pytest.raises(UserError, match="no complete checkpoint"):
        Checkpoint.newest(tmp_path)


def test_the_newest_two_complete_ones_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, 0, 1, of=2)
    save(tmp_path, 4, 0, of=2)
    prune(tmp_path)
    assert complete_steps(tmp_path) == [2, 3]
    assert step_folder(tmp_path, 4).exists()  # others still write it
    assert not step_folder(tmp_path, 1).exists()


def test_a_new_run_does_not_complete_an_old_ones_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1, 0, 1, of=2)
    save(tmp_path, 2, 0, of=2)
    remove_incomplete(tmp_path)
    save(tmp_path, 2, 1, of=2)
    assert complete_steps(tmp_path) == [1]


def test_another_model_is_one_clear_sentence(tmp_path: Path) -> None:
    save(tmp_path, 1, 0, of=1)
    checkpoint = Checkpoint.newest(tmp_path)
    with pytest.raises(UserError, match=r"has layer.weight in shape \(4, 6\), and the model in \(4, 5\): change --model"):
        checkpoint.read(KEY, (4, 5))
    with pytest.raises(UserError, match=r"has no weight of other: it is of another model"):
        checkpoint.read(TensorKey(name="other", kind="weight"), (4, 6))
