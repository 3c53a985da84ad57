"""Checkpoints on disk: a folder for every saved step, in it one Arrow file per process.

    DIR/step-00000120/0-of-4.arrow
                      1-of-4.arrow ...

A file gets its name when all of it is on the disk, so a checkpoint is complete when all names are there. Processes that may be
lost while they write do so in a folder of the attempt, and it is published when all have written. What the tensors are
named after does not depend on who wrote them. It knows neither processes nor threads.
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
"""The kind of a `TensorKey` that is no state of the optimizer."""
WAY = "way"
"""Of training, beside the loader's state."""
KEPT = 2
"""Complete checkpoints: one may turn out to be unreadable."""
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
    """Which tensor of the whole model a tensor is, or which slice of one."""

    name: str
    """Of the parameter in the whole model."""
    kind: str
    """"weight", or what AdamW calls this of its state."""
    dim: int | None = None
    """Along which slices lie; None: it is whole."""
    index: int = 0
    count: int = 1
    """Of slices."""


def step_folder(folder: Path, step: int) -> Path:
    """Of the checkpoint after so many steps."""
    return folder / f"step-{step:08}"


def write(
    folder: Path, step: int, rank: int, num_ranks: int, loader: Mapping[str, Any], tensors: Mapping[TensorKey, Tensor]
) -> None:
    """A process's file of a checkpoint. `tensors`: float32, on the host, contiguous. Raises OSError."""
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
    """In which processes `write` what is to be published in `folder`."""
    return folder / f"{_ATTEMPT}{attempt}"


def publish(folder: Path, attempt: int, step: int) -> None:
    """By one process, when all have written: their checkpoint takes the place of a former one; files of other attempts go.

    Raises FileNotFoundError where the processes of another attempt have published theirs.
    """
    whole, final = step_folder(attempt_folder(folder, attempt), step), step_folder(folder, step)
    if final.exists():
        final.rename(whole.with_name("former"))
    whole.rename(final)
    _sync(folder)
    for path in folder.glob(f"{_ATTEMPT}*"):
        shutil.rmtree(path)


def complete_steps(folder: Path) -> list[int]:
    """Of the checkpoints that can be loaded, in order."""
    steps = [int(path.name.removeprefix("step-")) for path in folder.glob("step-[0-9]*")]
    return sorted(step for step in steps if _is_complete(step_folder(folder, step)))


def prune(folder: Path) -> None:
    """Remove what is older than the newest complete checkpoints."""
    for step in complete_steps(folder)[-KEPT:][:1]:
        for path in folder.glob("step-[0-9]*"):
            if path.name < step_folder(folder, step).name:
                shutil.rmtree(path)


def remove_incomplete(folder: Path) -> None:
    """Before the first process writes: their files are not to be taken for those of a new run."""
    complete = {step_folder(folder, step) for step in complete_steps(folder)}
    for path in folder.glob("step-[0-9]*"):
        if path not in complete:
            shutil.rmtree(path)


class Checkpoint:
    """A complete one, mapped into memory: only what is asked for is read."""

    def __init__(self, folder: Path, step: int) -> None:
        self.step = step
        self._folder = step_folder(folder, step)
        self._rows: dict[tuple[str, str], list[pa.RecordBatch]] = {}
        """By name and kind: a row for every slice."""
        self.loader: dict[str, Any] = {}
        """Its state, as a StepLoader takes it back."""
        for path in sorted(self._folder.glob("*.arrow")):
            with _open(path) as reader:
                self.loader = json.loads(reader.schema.metadata[_LOADER])
                for number in range(reader.num_record_batches):
                    row = reader.get_batch(number)
                    self._rows.setdefault((_field(row, "name"), _field(row, "kind")), []).append(row)

    @classmethod
    def newest(cls, folder: Path) -> Checkpoint:
        """Raises UserError where there is none."""
        steps = complete_steps(folder)
        if not steps:
            raise UserError(f"there is no complete checkpoint in {folder}: name the folder that --checkpoint wrote to")
        return cls(folder, steps[-1])

    def __contains__(self, key: TensorKey) -> bool:
        """Whether it has the tensor, however it was cut."""
        return (key.name, key.kind) in self._rows

    def read(self, key: TensorKey, shape: Sequence[int]) -> Tensor:
        """A copy, on the host. `shape`: of what the key names. Raises UserError where it is missing or has another shape."""
        rows = self._rows.get((key.name, key.kind))
        if rows is None:
            raise UserError(f"{self._folder} has no {key.kind} of {key.name}: it is of another model, change --model")
        slices = [_values(row) for row in sorted(rows, key=lambda row: int(_field(row, "index")))]
        dim = _field(rows[0], "dim")
        whole = slices[0] if dim is None else np.concatenate(slices, axis=dim)
        own = whole if key.dim is None else np.split(whole, key.count, axis=key.dim)[key.index]
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
    """Whether its end is there: a file that was cut off has none."""
    try:
        _open(path)
    except pa.ArrowInvalid:
        return False
    return True


def _sync(folder: Path) -> None:
    """Have the names in it last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
