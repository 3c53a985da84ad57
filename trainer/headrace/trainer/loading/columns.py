"""Column-wise access to record batches of one schema, all batches joined: media as flat tensors, the rest as small arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute  # which lists are flattened by: loaded now, as it would hold up the first step for a quarter of a second
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from headrace.errors import HeadraceError
from headrace.sample import LABEL_IGNORED, SCHEMA
from headrace.trainer.loading.buffers import BufferPool, aligned

MEDIA = {"patches": torch.uint8, "mel": torch.float16}
"""The media columns, which may be large, and the dtypes of their values."""
_DTYPES = {"sample_id": np.int64} | dict.fromkeys(("input_ids", "labels", "image_grids", "mel_frames"), np.int32)
_EMPTY = torch.empty(0, dtype=torch.uint8)


def is_view(batches: Sequence[pa.RecordBatch], buffers: BufferPool) -> bool:
    """Return whether media tensors are views of these batches and not copies: of a single one, unless `buffers` are pinned, or
    shared with other processes."""
    return len(batches) == 1 and not buffers.copies_everything


class Columns:
    """Record batches read column by column. All have the same columns of `headrace.sample.SCHEMA`, in the schema's order."""

    def __init__(self, batches: Sequence[pa.RecordBatch], buffers: BufferPool) -> None:
        """`buffers`: the pool that media are copied into. Raises HeadraceError where a batch has another schema."""
        self._batches = batches
        self._buffers = buffers
        self._shown = is_view(batches, buffers)
        self.names = frozenset(batches[0].schema.names if batches else ())
        self.num_rows = sum(batch.num_rows for batch in batches)
        expected = pa.schema([field for field in SCHEMA if field.name in self.names])
        for batch in batches:
            if "sample_id" not in self.names or not batch.schema.equals(expected):
                raise HeadraceError(f"a payload batch has the columns {batch.schema.names}, not the schema of this release")

    def lengths(self, name: str) -> NDArray[np.int32]:
        """Return the (n,) numbers of values per row in a list column, which must be there."""
        return np.concatenate([np.diff(batch.column(name).offsets.to_numpy()) for batch in self._batches])

    def target_weights(self) -> NDArray[np.float32] | None:
        """Return the (T,) weights of all tokens in the loss, not shifted; None if every target weighs 1.

        Raises HeadraceError where a sample has weights, and not one for each label.
        """
        lengths = self.lengths("target_weights") if "target_weights" in self.names else np.zeros(self.num_rows, np.int32)
        if not lengths.any():
            return None
        of_labels = self.lengths("labels")
        if not np.array_equal(lengths[lengths > 0], of_labels[lengths > 0]):
            raise HeadraceError("a payload batch has samples with different numbers of labels and target_weights")
        weights: NDArray[np.float32] = (self.values("labels") != LABEL_IGNORED).astype(np.float32)
        weights[np.repeat(lengths > 0, of_labels)] = np.concatenate(self._arrays("target_weights"))
        return weights

    def values(self, name: str) -> NDArray[np.integer]:
        """Return the flattened values of an integer column, not to be written to; (0,) if the column is missing."""
        arrays: list[NDArray[np.integer]] = self._arrays(name)
        if len(arrays) == 1:
            return arrays[0]
        return np.concatenate(arrays) if arrays else np.empty(0, _DTYPES[name])

    def media(self) -> dict[str, Tensor]:
        """Return the flat values of each media column: views of a single batch, or copies in one buffer (see `is_view`)."""
        if self._shown:
            return {name: self._view(name) for name in MEDIA}
        arrays = {name: self._arrays(name) for name in MEDIA}
        sizes = {name: sum(array.nbytes for array in arrays[name]) for name in MEDIA}
        buffer = self._buffers.take(sum(map(aligned, sizes.values()))) if any(sizes.values()) else _EMPTY
        media, start = {}, 0
        for name, dtype in MEDIA.items():
            media[name] = buffer[start : start + sizes[name]].view(dtype)
            _join(arrays[name], media[name].numpy())
            start += aligned(sizes[name])
        return media

    def _view(self, name: str) -> Tensor:
        return from_dlpack(_flat(self._batches[0], name)) if name in self.names else torch.empty(0, dtype=MEDIA[name])

    def _arrays(self, name: str) -> list[NDArray[Any]]:
        """Return views of a column's values, one for each batch that has any."""
        if name not in self.names:
            return []
        return [values.to_numpy() for values in (_flat(batch, name) for batch in self._batches) if len(values)]


def _flat(batch: pa.RecordBatch, name: str) -> pa.Array:
    column = batch.column(name)
    while pa.types.is_nested(column.type):
        column = column.flatten()  # respects the offset of a sliced batch
    return column


def _join(sources: Sequence[np.ndarray], target: np.ndarray) -> None:
    """Concatenate arrays into `target`. By numpy: torch.cat synchronises OpenMP threads at each piece, which on busy cores takes
    far longer than the copying itself.
    """
    start = 0
    for source in sources:
        target[start : start + len(source)] = source
        start += len(source)
