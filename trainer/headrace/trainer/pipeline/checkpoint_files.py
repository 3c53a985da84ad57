"""The format of checkpoints on disk: a folder for every saved step, with one Arrow file per process.

    DIR/step-00000120/0-of-4.arrow
                      1-of-4.arrow ...

A file gets its final name once all of it is on disk, so a checkpoint is complete when all names are there. Processes that may
be lost while they write use a separate folder for each attempt, which is published once all have written. The keys of the
tensors do not depend on which process wrote them. This module uses neither torch.distributed nor threads.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from headrace.errors import UserError

WEIGHT = "weight"
"""The `TensorKey.kind` of a weight; all other kinds are optimizer state."""
TRAINING_RECORD = "way"
"""The key of the record of how the weights were trained (`agreement.training_record`), in a checkpoint's loader state."""
NUM_KEPT = 2
"""Number of complete checkpoints that `prune` keeps: more than one, as the newest may turn out to be unreadable."""
_ATTEMPT = "attempt-"
_LOADER = b"loader"
_SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("kind", pa.string()),
        ("dim", pa.int8()),
        ("index", pa.int32()),
        ("count", pa.int32()),
        ("shape", pa.list_(pa.int64())),
        ("values", pa.large_list(pa.float32())),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorKey:
    """The key of a tensor in a checkpoint: a parameter of the whole model or its optimizer state, whole or one slice of it."""

    name: str
    """Name of the parameter in the whole model."""
    kind: str
    """Either "weight" or AdamW's name for the state: "step", "exp_avg" or "exp_avg_sq"."""
    dim: int | None = None
    """Dimension along which the tensor is sliced; None if it is whole."""
    index: int = 0
    count: int = 1
    """Number of slices."""


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` steps."""
    return folder / f"step-{step:08}"


def write(
    folder: Path, step: int, rank: int, num_ranks: int, loader: Mapping[str, Any], tensors: Mapping[TensorKey, Tensor]
) -> None:
    """Write one process's file of a checkpoint and sync it to disk. Raises OSError.

    `loader`: state of the StepLoader, as JSON values. `tensors`: float32, on the host, contiguous.
    """
    into = step_folder(folder, step)
    into.mkdir(parents=True, exist_ok=True)
    name = f"{rank}-of-{num_ranks}"
    growing = into / f"{name}.growing"
    with growing.open("wb") as file:
        with pa.ipc.new_file(file, _SCHEMA.with_metadata({_LOADER: json.dumps(dict(loader))})) as writer:
            for key, tensor in tensors.items():
                writer.write_batch(_row(key, tensor))
        file.flush()
        os.fsync(file.fileno())
    growing.rename(into / f"{name}.arrow")
    _sync(into)
    _sync(folder)


def attempt_folder(folder: Path, attempt: int) -> Path:
    """Return the folder that processes pass to `write` in this attempt, until `publish` moves the result to `folder`."""
    return folder / f"{_ATTEMPT}{attempt}"


def publish(folder: Path, attempt: int, step: int) -> None:
    """Move an attempt's checkpoint into place, over an older one of the same step, and remove the folders of all attempts.

    One process calls it, once all have written. Raises FileNotFoundError if another attempt was published in the meantime.
    """
    whole, final = step_folder(attempt_folder(folder, attempt), step), step_folder(folder, step)
    if final.exists():
        final.rename(whole.with_name("former"))
    whole.rename(final)
    _sync(folder)
    for path in folder.glob(f"{_ATTEMPT}*"):
        shutil.rmtree(path)


def complete_steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, in ascending order."""
    steps = [int(path.name.removeprefix("step-")) for path in folder.glob("step-[0-9]*")]
    return sorted(step for step in steps if _is_complete(step_folder(folder, step)))


def prune(folder: Path) -> None:
    """Remove all checkpoints, complete or not, that are older than the newest NUM_KEPT complete ones."""
    for step in complete_steps(folder)[-NUM_KEPT:][:1]:
        for path in folder.glob("step-[0-9]*"):
            if path.name < step_folder(folder, step).name:
                shutil.rmtree(path)


def remove_incomplete(folder: Path) -> None:
    """Remove incomplete checkpoints, whose files could be taken for those of a new run. Call it before any process writes."""
    complete = {step_folder(folder, step) for step in complete_steps(folder)}
    for path in folder.glob("step-[0-9]*"):
        if path not in complete:
            shutil.rmtree(path)


class Checkpoint:
    """A complete checkpoint, mapped into memory: only the tensors that are asked for are read."""

    def __init__(self, folder: Path, step: int) -> None:
        self.step = step
        self._folder = step_folder(folder, step)
        self._rows: dict[tuple[str, str], list[pa.RecordBatch]] = {}
        """Record batches of one row each, one for every slice, by the tensor's name and kind."""
        self.loader: dict[str, Any] = {}
        """The loader's state, as `StepLoader.load_state_dict` takes it."""
        for path in sorted(self._folder.glob("*.arrow")):
            with _open(path) as reader:
                self.loader = json.loads(reader.schema.metadata[_LOADER])
                for number in range(reader.num_record_batches):
                    row = reader.get_batch(number)
                    self._rows.setdefault((_field(row, "name"), _field(row, "kind")), []).append(row)

    @classmethod
    def newest(cls, folder: Path) -> Checkpoint:
        """Open the newest complete checkpoint in a folder. Raises UserError if there is none."""
        steps = complete_steps(folder)
        if not steps:
            raise UserError(f"there is no complete checkpoint in {folder}: name the folder that --checkpoint wrote to")
        return cls(folder, steps[-1])

    def __contains__(self, key: TensorKey) -> bool:
        """Whether the checkpoint has the tensor, however it was sliced when it was saved."""
        return (key.name, key.kind) in self._rows

    def read(self, key: TensorKey, shape: Sequence[int]) -> Tensor:
        """Return a float32 copy, on the host, of the tensor or slice that the key names, however it was sliced when saved.

        `shape`: the expected shape. Raises UserError if the tensor is missing or has another shape.
        """
        rows = self._rows.get((key.name, key.kind))
        if rows is None:
            raise UserError(f"{self._folder} has no {key.kind} of {key.name}: it is of another model, change --model")
        slices = [_values(row) for row in sorted(rows, key=lambda row: int(_field(row, "index")))]
        dim = _field(rows[0], "dim")
        whole = slices[0] if dim is None else np.concatenate(slices, axis=dim)
        own = whole if key.dim is None else np.array_split(whole, key.count, axis=key.dim)[key.index]
        if own.shape != tuple(shape):
            raise UserError(
                f"{self._folder} has {key.name} in shape {own.shape}, and the model in {tuple(shape)}: change --model"
            )
        return torch.from_numpy(np.array(own))


def _row(key: TensorKey, tensor: Tensor) -> pa.RecordBatch:
    values = pa.Array.from_buffers(pa.float32(), tensor.numel(), [None, pa.py_buffer(tensor.numpy())])
    ends = pa.array([0, tensor.numel()], pa.int64())
    columns = [
        pa.array([key.name]),
        pa.array([key.kind]),
        pa.array([key.dim], pa.int8()),
        pa.array([key.index], pa.int32()),
        pa.array([key.count], pa.int32()),
        pa.array([list(tensor.shape)], pa.list_(pa.int64())),
        pa.LargeListArray.from_arrays(ends, values),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)


def _field(row: pa.RecordBatch, name: str) -> Any:
    return row.column(name)[0].as_py()


def _values(row: pa.RecordBatch) -> np.ndarray:
    flat: np.ndarray = row.column("values").flatten().to_numpy()
    return flat.reshape(_field(row, "shape"))


def _open(path: Path) -> pa.RecordBatchFileReader:
    return pa.ipc.open_file(pa.memory_map(str(path)))


def _is_complete(path: Path) -> bool:
    files = list(path.glob("*.arrow"))
    return bool(files) and len(files) == int(files[0].stem.split("-of-")[1]) and all(map(_is_readable, files))


def _is_readable(path: Path) -> bool:
    """Whether the file has an Arrow footer, which a truncated file lacks."""
    try:
        _open(path)
    except pa.ArrowInvalid:
        return False
    return True


def _sync(folder: Path) -> None:
    """Sync a folder to disk, so that the names in it survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
