"""Trained weights for `torch.distributed.checkpoint` (DCP), by the names that they have in the `state_dict` of `transformers`.

torch pickles the index of such a checkpoint, which is why Headrace writes but never reads one.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from headrace.errors import UserError
from headrace.trainer.models.huggingface.safetensors_export import Entry, Write, write_tensors


def write_checkpoint(entries: Sequence[Entry], folder: Path) -> None:
    """Write the tensors that the model itself has. Each is read when it is written."""
    named = {name: entry for entry in entries for name in entry.own_names}
    state = {name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for name, entry in named.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")  # one process is meant
        save(state, storage_writer=FileSystemWriter(folder), planner=_Reading(named), no_dist=True)


WRITERS: Mapping[str, Write] = {"safetensors": write_tensors, "dcp": write_checkpoint}
"""What writes a format, by its name."""


def writer(format: str) -> Write:
    """Return what writes a format. Raises UserError for an unknown one."""
    if format not in WRITERS:
        raise UserError(f"no format {format!r}; there are {', '.join(WRITERS)}")
    return WRITERS[format]


class _Reading(DefaultSavePlanner):
    """Plans by shapes and dtypes, and reads a tensor when it is its turn."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        super().__init__(flatten_state_dict=False)
        self._entries = entries

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._entries[write_item.index.fqn].read()
