"""Reading of single tensors from a local safetensors checkpoint: a stage reads only those that it has."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
Layout = Mapping[str, str]
"""How a checkpoint writes the names of tensors: beginnings of a model's own names, and what stands in their place."""


def has_weights(folder: Path) -> bool:
    """Return whether a folder holds weights in safetensors."""
    return (folder / INDEX).is_file() or (folder / SINGLE).is_file()


@torch.no_grad()
def load(folder: Path, tensors: Mapping[str, Sequence[Tensor]], layouts: Sequence[Layout]) -> None:
    """Copy tensors of the checkpoint into the given ones, by the names that the first of the layouts with them all gives them.

    Several tensors for one name get consecutive rows of the stored one, in order. Raises UserError where a tensor is missing or
    has another shape, or a file cannot be read.
    """
    files = tensor_files(folder)
    layout = layout_of(files, tensors, layouts)
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for name, parts in tensors.items():
            stored = stored_name(name, layout)
            if stored not in files:
                raise UserError(
                    f"the checkpoint {folder} has no tensor {stored}, which its config.json asks for: take a whole one"
                )
            path = files[stored]
            if path not in opened:
                opened[path] = stack.enter_context(open_tensors(path))
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


def read_tensor(folder: Path, name: str, layouts: Sequence[Layout]) -> Tensor:
    """Return one tensor of a checkpoint by the model's own name. Raises UserError where it is missing."""
    files = tensor_files(folder)
    stored = stored_name(name, layout_of(files, [name], layouts))
    if stored not in files:
        raise UserError(f"the checkpoint {folder} has no tensor {stored}, which its config.json asks for: take a whole one")
    with open_tensors(files[stored]) as tensors:
        found: Tensor = tensors.get_tensor(stored)
        return found


def stored_name(name: str, layout: Layout) -> str:
    """Return the name that a tensor has in a checkpoint of this layout: of several beginnings that it has the longest counts."""
    known = max((beginning for beginning in layout if name.startswith(beginning)), key=len, default=None)
    return name if known is None else layout[known] + name[len(known) :]


def layout_of(stored: Container[str], names: Iterable[str], layouts: Sequence[Layout]) -> Layout:
    """Return the first layout in which all `names` are among the `stored` ones, or else the one that misses the fewest."""
    names = list(names)
    return min(layouts, key=lambda layout: sum(stored_name(name, layout) not in stored for name in names))


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor, by the tensor's stored name. Raises UserError if there is none or it cannot be read."""
    index = folder / INDEX
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()}
    with open_tensors(folder / SINGLE) as file:
        return dict.fromkeys(file.keys(), folder / SINGLE)


def open_tensors(path: Path) -> Any:
    """Open a file of tensors, whose `get_tensor` reads one. Raises UserError."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as err:
        raise UserError(f"cannot read {path}: {err}; fetch it again") from err
