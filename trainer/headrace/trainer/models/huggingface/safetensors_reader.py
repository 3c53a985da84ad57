"""Reading of single tensors from a local safetensors checkpoint: a stage reads only those that it has."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.errors import UserError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def has_weights(folder: Path) -> bool:
    """Return whether a folder holds weights in safetensors."""
    return (folder / _INDEX).is_file() or (folder / _SINGLE).is_file()


@torch.no_grad()
def load(folder: Path, tensors: Mapping[str, Sequence[Tensor]], prefixes: Iterable[str]) -> None:
    """Copy tensors of the checkpoint into the given ones, by name or, if they are stored so, by a prefix and the name.

    Several tensors for one name get consecutive rows of the stored one, in order. Raises UserError where a tensor is missing or
    has another shape, or a file cannot be read.
    """
    files = _files(folder)
    prefix = next((prefix for prefix in prefixes if f"{prefix}{next(iter(tensors), '')}" in files), "")
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for name, parts in tensors.items():
            stored = f"{prefix}{name}"
            if stored not in files:
                raise UserError(
                    f"the checkpoint {folder} has no tensor {stored}, which its config.json asks for: take a whole one"
                )
            path = files[stored]
            if path not in opened:
                opened[path] = stack.enter_context(_open(path))
            shape = tuple(opened[path].get_slice(stored).get_shape())
            rows = [len(part) for part in parts]
            expected = (sum(rows), *parts[0].shape[1:])
            if shape != expected:
                raise UserError(
                    f"tensor {stored} of the checkpoint {folder} has the shape {shape}, where its config.json asks for "
                    f"{expected}: take a config.json that belongs to it"
                )
            for part, values in zip(parts, opened[path].get_tensor(stored).split(rows), strict=True):
                part.copy_(values)


def _files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor, by the tensor's name."""
    index = folder / _INDEX
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()}
    with _open(folder / _SINGLE) as file:
        return dict.fromkeys(file.keys(), folder / _SINGLE)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as err:
        raise UserError(f"cannot read {path}: {err}; fetch it again") from err
