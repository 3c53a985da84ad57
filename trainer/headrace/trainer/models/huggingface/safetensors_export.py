"""Trained weights as a folder that `transformers` loads: safetensors with the published names, configuration and tokenizer.

Names, files beside the weights and the dtype are those of the folder that training started from. Tensors that training does not
have, such as a tower's last layer of which LLaVA takes no features, are copied from there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from headrace.errors import UserError
from headrace.trainer.models.adapted_units import HuggingFaceUnits
from headrace.trainer.models.huggingface.parts import Adapted
from headrace.trainer.models.huggingface.safetensors_reader import (
    INDEX,
    SINGLE,
    has_weights,
    layout_of,
    open_tensors,
    stored_name,
    tensor_files,
)
from headrace.trainer.models.multimodal import MultimodalModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes that weights can be exported in, by the name that a config.json gives them."""
_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
MAX_FILE_BYTES = 4 * 2**30
_BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Endings of the files beside weights that make a folder whole: configuration, tokenizer, chat template."""

Read = Callable[[str, Sequence[int]], Tensor]
"""Returns a trained parameter, on the host, by its name in the whole model and its shape."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """A tensor of the exported folder."""

    name: str
    """As published models are stored."""
    own_names: Sequence[str]
    """In the `state_dict` of the model of `transformers`: several where it is tied, none where it is of another model."""
    shape: Sequence[int]
    dtype: torch.dtype
    read_as_found: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def read(self) -> Tensor:
        """Return the tensor in its dtype, on the host."""
        return self.read_as_found().to(self.dtype).contiguous()


Write = Callable[[Sequence[Entry], Path], None]
"""Writes all tensors to a folder."""


def export(
    model: MultimodalModel, units: HuggingFaceUnits, read: Read, folder: Path, write: Write, dtype: str | None = None
) -> list[Path]:
    """Write every model of `units` to `folder`, or several to folders of their units' names in it, and return these.

    model: the whole model, which may be on the meta device. read: its trained parameters. write: one of `dcp_export.WRITERS`.
    dtype: a key of DTYPES; None: that of the folder that training started from. Raises UserError where `folder` is not empty, or
    a tensor is nowhere.
    """
    if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]):
        raise UserError(f"{folder} is not empty: name a folder that is, or none yet")
    named = {name: path for name, path in units if path is not None}
    if not named:
        raise UserError("only models of transformers are exported, and the trainers had none: name those of their topology")
    written = []
    for unit, path in named.items():
        parts = [name for name, child in model.named_children() if isinstance(child, Adapted)]
        if unit != "whole":
            of_unit = "decoder" if unit == "llm" else unit
            parts = [name for name in parts if name in (of_unit, f"{of_unit}_projector")]
        into = folder if len(named) == 1 else folder / unit
        _write_folder({name: model.get_submodule(name) for name in parts}, path, read, into, write, dtype)
        written.append(into)
    return written


def _write_folder(
    parts: Mapping[str, torch.nn.Module], path: Path, read: Read, folder: Path, write: Write, dtype: str | None
) -> None:
    source = path if path.is_dir() else path.parent
    config = json.loads((source / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    entries = _entries(parts, source, read, config, dtype)
    growing = folder.with_name(f"{folder.name}.growing")
    shutil.rmtree(growing, ignore_errors=True)
    growing.mkdir(parents=True)
    for file in source.iterdir() if path.is_dir() else ():
        if file.name == "additional_chat_templates":
            shutil.copytree(file, growing / file.name)
        elif file.suffix in _BESIDE and file.name not in ("config.json", INDEX):
            shutil.copyfile(file, growing / file.name)
    if dtype is not None:
        _name_dtype(config, dtype)
    (growing / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write(entries, growing)
    if folder.exists():
        folder.rmdir()
    growing.rename(folder)


def _entries(
    parts: Mapping[str, torch.nn.Module], source: Path, read: Read, config: Mapping[str, object], dtype: str | None
) -> list[Entry]:
    """Return the tensors of the folder, sorted by name. Raises UserError for one that is neither trained nor in the source."""
    files = tensor_files(source) if has_weights(source) else {}
    units = {name: unit for name, unit in parts.items() if isinstance(unit, Adapted)}
    layouts = next(iter(units.values())).layouts
    ours: dict[str, list[tuple[str, Sequence[int]]]] = {}
    for unit_name, unit in units.items():
        for name, parameter in unit.named_parameters():
            ours.setdefault(unit.stored_names[name], []).append((f"{unit_name}.{name}", parameter.shape))
    fixed = {name: tensor for unit in units.values() for name, tensor in unit.fixed().items()}
    layout = layout_of(files, ours, layouts) if files else layouts[0]
    tied = {stored_name(name, layout) for unit in units.values() for name in unit.tied_names}
    usual = DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), torch.float32)
    aliases = {unit.stored_names["embed.weight"]: unit.tied_names for unit in units.values() if unit.tied_names}
    own = {stored_name(name, layout): name for unit in units.values() for name in unit.model_names}
    entries = []
    for name, of_name in ours.items():
        stored = stored_name(name, layout)
        into = DTYPES[dtype] if dtype else _header(files[stored], stored)[0] if stored in files else usual
        shape = (sum(part[0] for _, part in of_name), *of_name[0][1][1:])
        names, found = (name, *aliases.get(name, ())), partial(_joined, read, of_name)
        entries.append(Entry(name=stored, own_names=names, shape=shape, dtype=into, read_as_found=found))
    done = {entry.name for entry in entries} | tied
    for stored in files.keys() - done:
        found_dtype, shape = _header(files[stored], stored)
        into = DTYPES[dtype] if dtype and found_dtype.is_floating_point else found_dtype
        names = (own[stored],) if stored in own else ()
        copied = partial(_copied, files[stored], stored)
        entries.append(Entry(name=stored, own_names=names, shape=shape, dtype=into, read_as_found=copied))
    if not files:
        missing = set().union(*(unit.model_names for unit in units.values())) - ours.keys() - fixed.keys()
        if missing:
            raise UserError(
                f"{min(missing)} and {len(missing) - 1} other tensors are not trained, and {source} has no weights to copy them "
                "from: begin training from a folder with weights"
            )
        for name, table in fixed.items():
            into, stored = DTYPES[dtype] if dtype else usual, stored_name(name, layout)
            same = partial(_same, table)
            entries.append(Entry(name=stored, own_names=(name,), shape=table.shape, dtype=into, read_as_found=same))
    return sorted(entries, key=lambda entry: entry.name)


def write_tensors(entries: Sequence[Entry], folder: Path) -> None:
    """Write the tensors into files of at most MAX_FILE_BYTES, unless one tensor alone is larger."""
    shards: list[list[Entry]] = [[]]
    for entry in entries:
        if shards[-1] and sum(other.num_bytes for other in shards[-1]) + entry.num_bytes > MAX_FILE_BYTES:
            shards.append([])
        shards[-1].append(entry)
    where = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {entry.name: entry.read() for entry in shard}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        where.update(dict.fromkeys(tensors, name))
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(entry.num_bytes for entry in entries)}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _name_dtype(config: dict[str, object], dtype: str) -> None:
    """Replace the dtype in a configuration and in those of its parts, where they name one, and name it in the outer one."""
    config["dtype"] = dtype
    config.pop("torch_dtype", None)
    for part in config.values():
        if isinstance(part, dict) and ("dtype" in part or "torch_dtype" in part):
            _name_dtype(part, dtype)


def _joined(read: Read, parts: Sequence[tuple[str, Sequence[int]]]) -> Tensor:
    """Read parameters that are consecutive rows of one stored tensor."""
    return torch.cat([read(name, shape) for name, shape in parts]) if len(parts) > 1 else read(*parts[0])


def _copied(file: Path, name: str) -> Tensor:
    with open_tensors(file) as tensors:
        found: Tensor = tensors.get_tensor(name)
        return found


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _header(file: Path, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return dtype and shape of a stored tensor."""
    with open_tensors(file) as tensors:
        header = tensors.get_slice(name)
        dtype = _STORED.get(header.get_dtype()) or tensors.get_tensor(name).dtype
        return dtype, tuple(header.get_shape())
