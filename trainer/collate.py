"""Arrow record batches -> one packed microbatch of tensors: samples lie one behind the other, nothing is padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from headrace.errors import HeadraceError
from headrace.sample import LABEL_IGNORED, SCHEMA


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedMicrobatch:
    """A microbatch as a model takes it.

    n: samples, T: tokens, I: images, P: patches, A: recordings, F: mel frames. Payload (`input_ids`, `labels`,
    `position_ids`, `patches`, `mel`) goes to the device; the layout (`sample_ids`, `image_grids`, `mel_frames` and the
    cumulative lengths) stays on the host, where its numbers are read without waiting for the device.

    Payload may be a view of the Arrow buffers that it came from: do not write into it.
    """

    sample_ids: Tensor
    """(n,) int64, in packing order."""
    input_ids: Tensor
    """(T,) int64, modality placeholders expanded."""
    labels: Tensor
    """(T,) int64, aligned with the prediction: `labels[t]` is the token that follows `input_ids[t]` in its sample, or
    LABEL_IGNORED. The last token of a sample predicts nothing."""
    position_ids: Tensor
    """(T,) int64, 0 at the first token of every sample."""
    cu_seqlens: Tensor
    """(n + 1,) int32: sample i has the tokens cu_seqlens[i]:cu_seqlens[i + 1]."""
    patches: Tensor
    """(P, 3 * patch * patch) uint8, channel-first inside a patch, merge groups contiguous; (0, 0) without images."""
    image_grids: Tensor
    """(I, 3) int32: (t, h, w) in patches."""
    image_cu_seqlens: Tensor
    """(I + 1,) int32 into the patches."""
    mel: Tensor
    """(F, bins) float16 log-mel; (0, 0) without recordings."""
    mel_frames: Tensor
    """(A,) int32."""
    mel_cu_seqlens: Tensor
    """(A + 1,) int32 into the mel frames."""
    num_targets: int
    """Labels that are not ignored: the share of this microbatch in the denominator of the step's loss. The sum of its
    samples' `Probe.num_targets`."""

    def to(self, device: torch.device | str) -> Self:
        """The microbatch with its payload on `device`. The copy does not block where the payload is pinned."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in _PAYLOAD}
        return replace(self, **moved)

    def pin_memory(self) -> Self:
        """The microbatch with its payload in page-locked memory, from which `to` copies asynchronously. Needs a GPU."""
        return replace(self, **{name: getattr(self, name).pin_memory() for name in _PAYLOAD})


_PAYLOAD = ("input_ids", "labels", "position_ids", "patches", "mel")


def collate(batches: Sequence[pa.RecordBatch], *, patch_values: int = 0, mel_bins: int = 0) -> PackedMicrobatch:
    """Packs batches of `headrace.sample.SCHEMA` in the order given; none, or batches without rows, give n = 0.

    patch_values, mel_bins: widths of `patches` and `mel` where no sample has any, (0, width).

    One batch is taken without a copy of `patches` and `mel`; several cost one copy. Raises HeadraceError where a batch
    has another schema or its columns do not fit each other.
    """
    for batch in batches:
        if not batch.schema.equals(SCHEMA):
            raise HeadraceError(f"a payload batch has the columns {batch.schema.names}, not the schema of this release")
    lengths = _lengths(batches, "input_ids")
    if not torch.equal(lengths, _lengths(batches, "labels")):
        raise HeadraceError("a payload batch has samples with different numbers of input_ids and labels")
    cu_seqlens = cumulative(lengths)
    labels = _predicted(_values(batches, "labels"), lengths, cu_seqlens)
    grids = _values(batches, "image_grids").view(-1, 3)
    mel_frames = _values(batches, "mel_frames")
    image_cu_seqlens = cumulative(grids.prod(dim=1))
    mel_cu_seqlens = cumulative(mel_frames)
    starts = torch.repeat_interleave(cu_seqlens[:-1], lengths)
    return PackedMicrobatch(
        sample_ids=_values(batches, "sample_id"),
        input_ids=_values(batches, "input_ids").long(),
        labels=labels,
        position_ids=torch.arange(len(labels)) - starts,
        cu_seqlens=cu_seqlens,
        patches=_rows(_values(batches, "patches"), int(image_cu_seqlens[-1]), patch_values, "patches"),
        image_grids=grids,
        image_cu_seqlens=image_cu_seqlens,
        mel=_rows(_values(batches, "mel"), int(mel_cu_seqlens[-1]), mel_bins, "mel frames"),
        mel_frames=mel_frames,
        mel_cu_seqlens=mel_cu_seqlens,
        num_targets=int((labels != LABEL_IGNORED).sum()),
    )


def cumulative(lengths: Tensor) -> Tensor:
    """(n,) integers -> (n + 1,) int32 offsets, from 0 to their sum."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(lengths, dim=0, dtype=torch.int32, out=offsets[1:])
    return offsets


def _predicted(labels: Tensor, lengths: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Labels moved one to the left inside every sample, so that each lies where it is predicted."""
    shifted = labels.long().roll(-1)
    last = cu_seqlens[1:][lengths > 0] - 1
    shifted[last.long()] = LABEL_IGNORED
    return shifted


def _values(batches: Sequence[pa.RecordBatch], name: str) -> Tensor:
    """The innermost values of a column over all batches, flat; a view where there is one batch."""
    tensors = []
    for batch in batches:
        column = batch.column(name)
        while pa.types.is_nested(column.type):
            column = column.flatten()  # respects the offset of a sliced batch
        tensors.append(from_dlpack(column))
    if not tensors:
        return torch.empty(0, dtype=_DTYPES[name])
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


_DTYPES = {"sample_id": torch.int64, "patches": torch.uint8, "mel": torch.float16} | dict.fromkeys(
    ("input_ids", "labels", "image_grids", "mel_frames"), torch.int32
)


def _lengths(batches: Sequence[pa.RecordBatch], name: str) -> Tensor:
    lengths = [from_dlpack(batch.column(name).value_lengths()) for batch in batches]
    return torch.cat(lengths) if lengths else torch.empty(0, dtype=torch.int32)


def _rows(values: Tensor, num_rows: int, empty_width: int, what: str) -> Tensor:
    if (num_rows == 0 and len(values)) or (num_rows and (len(values) == 0 or len(values) % num_rows)):
        raise HeadraceError(f"a payload batch has {len(values)} values for {num_rows} {what}, which is no whole number of rows")
    return values.view(num_rows, -1) if num_rows else values.view(0, empty_width)
