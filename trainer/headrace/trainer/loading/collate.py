"""Packing of Arrow record batches into one microbatch of tensors: samples are concatenated.

`headrace.trainer.loading.packs` divides the microbatch into packs, and pads these where a job asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import HeadraceError, UserError
from headrace.sample import LABEL_IGNORED
from headrace.trainer.loading.buffers import BufferPool
from headrace.trainer.loading.columns import Columns
from headrace.trainer.loading.device_copy import to_device
from headrace.trainer.loading.padded import PaddedMicrobatch, padded_rows, unshifted

_Number = TypeVar("_Number", np.int64, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedMicrobatch:
    """The packed samples of one microbatch, the input of a model's forward.

    n: samples, s: segments, p: packs, T: tokens, I: images, P: patches, A: recordings, F: mel frames. Payload (token ids, labels,
    position ids, patches, mel) goes to the device; the layout (`sample_ids`, `image_grids`, `image_sizes`, `mel_frames` and the
    cumulative lengths) stays on the host, where its numbers are read without waiting for the device.

    Payload may be a view of the Arrow buffers that it came from: do not write into it. If a rank receives only the columns of
    its unit, the other tensors are empty: T = 0 without tokens; (0, width) patches or mel, beside the true grids and frames.
    """

    sample_ids: Tensor
    """(n,) int64, in packing order."""
    input_ids: Tensor
    """(T,) int64 token ids, modality placeholders expanded."""
    labels: Tensor
    """(T,) int64, aligned with the prediction: `labels[t]` is the token that follows `input_ids[t]` in its sample, or
    LABEL_IGNORED. The last token of a sample predicts nothing."""
    position_ids: Tensor
    """(T,) int64: position of each token in its segment, counted from 0."""
    mrope_position_ids: Tensor = field(default_factory=lambda: torch.zeros(3, 0, dtype=torch.int64))
    """(3, T) int64: positions in time, height and width (`headrace.trainer.loading.mrope`); (3, 0) unless the job has `mrope`."""
    cu_seqlens: Tensor
    """(s + 1,) int32: segment i has the tokens cu_seqlens[i]:cu_seqlens[i + 1]. A segment, outside of which its tokens attend to
    nothing, is a sample or, where the job has `pad_to_max_length`, the padding at the end of a pack."""
    sample_segments: Tensor
    """(n,) int32: the segment of each sample, rising; 0, 1, ..., n - 1 without padding. The other segments are padding: token
    ids without a meaning, with labels LABEL_IGNORED and positions from 0."""
    pack_offsets: Tensor
    """(p + 1,) int32: pack j has the tokens pack_offsets[j]:pack_offsets[j + 1], which are whole segments. Each sample is a pack
    of its own where the job has no `pack_tokens`; where it has `pad_to_max_length`, every pack has `pack_tokens` tokens."""
    patches: Tensor
    """(P, 3 * patch * patch) uint8, channel-first inside a patch, merge groups contiguous; (0, 0) without images."""
    image_grids: Tensor
    """(I, 3) int32: size (t, h, w) of each image, or of each tile of one that is cut, in patches."""
    image_sizes: Tensor = field(default_factory=lambda: torch.zeros(0, 2, dtype=torch.int32))
    """(I, 2) int32: height and width in pixels of the image that begins here, (0, 0) for its other tiles, in jobs with
    `image.fit: anyres`; otherwise (0, 2)."""
    image_cu_seqlens: Tensor
    """(I + 1,) int32: image i has the patches image_cu_seqlens[i]:image_cu_seqlens[i + 1]."""
    mel: Tensor
    """(F, bins) float16 log-mel; (0, 0) without recordings."""
    mel_frames: Tensor
    """(A,) int32: number of mel frames of each recording."""
    mel_cu_seqlens: Tensor
    """(A + 1,) int32: recording i has the mel frames mel_cu_seqlens[i]:mel_cu_seqlens[i + 1]."""
    images_per_sample: Tensor
    """(n,) int32: number of images of each sample."""
    recordings_per_sample: Tensor
    """(n,) int32: number of recordings of each sample."""
    num_targets: int
    """Number of labels that are not LABEL_IGNORED: the sum of its samples' `Probe.num_targets`."""
    target_weights: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float32))
    """(T,) float32, aligned with `labels`: by how much the loss of each target counts, 0 where there is none. (0,): each counts
    1, as in all jobs whose mappings do not have `weights`."""
    rows: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """(T,) int64, on the host: the place of each token in the whole microbatch, if this is a context-parallel slice of it. Then
    cu_seqlens, sample_segments and pack_offsets are of the whole, and media are whole, too. (0,): this is the whole."""
    mask_fields: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """(T,) int64, on the host: the fields of the whole microbatch's attention mask (`headrace.attention_mask`), with slices of a
    `Balanced` order. Otherwise (0,)."""

    @property
    def target_weight(self) -> float:
        """Sum of the weights of the targets, their number where each weighs 1: this microbatch's share in the denominator of the
        step's loss. Where they have weights, it waits for the device that these are on."""
        return float(self.target_weights.double().sum()) if len(self.target_weights) else float(self.num_targets)

    @property
    def max_seqlen(self) -> int:
        """Number of tokens of the longest segment, 0 without any."""
        return int(self.cu_seqlens.diff().max()) if len(self.cu_seqlens) > 1 else 0

    def flash_kwargs(self) -> dict[str, Tensor | int]:
        """Return the arguments of `flash_attn_varlen_func` that keep attention inside segments: cu_seqlens_q and _k, (s + 1,)
        int32 on the device of the tokens, max_seqlen_q and _k."""
        cu_seqlens = to_device(self.cu_seqlens, self.position_ids.device)
        longest = self.max_seqlen
        return {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": longest, "max_seqlen_k": longest}

    @property
    def unshifted_labels(self) -> Tensor:
        """(T,) int64: `unshifted_labels[t]` is the label of token t itself, for models that shift labels, as those of Hugging
        Face do. The first token of a segment has none."""
        self._check_whole("unshifted_labels")
        return unshifted(self.labels, self.cu_seqlens)

    def padded(self, multiple: int = 1) -> PaddedMicrobatch:
        """Return the tokens with a row for each sample, padded to the longest one, rounded up to a `multiple` of tokens."""
        self._check_whole("padded")
        fills = {"input_ids": 0, "position_ids": 0, "mrope_position_ids": 0, "labels": LABEL_IGNORED, "target_weights": 0}
        values = {name: getattr(self, name) for name in fills}
        values["attention_mask"] = torch.ones_like(self.input_ids)
        segments = self.sample_segments.long()
        rows = padded_rows(values, self.cu_seqlens, segments, {**fills, "attention_mask": 0}, multiple)
        return PaddedMicrobatch(**rows)

    def _check_whole(self, what: str) -> None:
        if len(self.rows):
            raise UserError(f"{what} is of a whole microbatch, and this is a context-parallel slice of one: leave out cp")

    def to(self, device: torch.device | str) -> Self:
        """Return the microbatch with its payload on `device`. The copy does not block if the payload is pinned."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in PAYLOAD}
        return replace(self, **moved)

    def pin_memory(self) -> Self:
        """Return the microbatch with its payload in page-locked memory, for asynchronous copies by `to`. Requires a GPU."""
        return replace(self, **{name: getattr(self, name).pin_memory() for name in PAYLOAD})


PAYLOAD = ("input_ids", "labels", "target_weights", "position_ids", "mrope_position_ids", "patches", "mel")
"""Fields of a PackedMicrobatch that go to the device; the others stay on the host."""


def collate(
    batches: Sequence[pa.RecordBatch],
    *,
    patch_values: int = 0,
    mel_bins: int = 0,
    vocab_size: int | None = None,
    buffers: BufferPool | None = None,
) -> PackedMicrobatch:
    """Pack batches of `headrace.sample.SCHEMA` into one microbatch, in the order given. Without any rows, n = 0.

    The batches may all lack the same columns, for example those that a unit does not need (`headrace.sample.UNIT_COLUMNS`).
    Missing columns give empty tensors: without input_ids T = 0, without labels there are no targets.

    patch_values, mel_bins: widths of the empty (0, width) `patches` and `mel` where no sample has any. vocab_size: upper bound,
    exclusive, of the token ids; None: not checked. buffers: the pool that patches and mel are copied into; None: new memory.

    The `patches` and `mel` of a single batch are views of it, unless `buffers` are pinned or shared. All others are copied once,
    after which the batches are not read any more (`headrace.trainer.loading.columns.is_view`).

    Raises HeadraceError where a batch has another schema or its columns do not fit each other, UserError where a token lies
    outside of the vocabulary.
    """
    columns = Columns(batches, buffers or BufferPool(max_idle_bytes=0))
    lengths = _token_lengths(columns)  # numpy throughout: torch takes several times as long for arrays this small
    cu_seqlens = _offsets(lengths)
    input_ids = columns.values("input_ids")
    if vocab_size is not None:
        _check_tokens(input_ids, vocab_size, columns.values("sample_id"), cu_seqlens)
    labels = _predicted(columns.values("labels").astype(np.int64), cu_seqlens, LABEL_IGNORED)
    weights = columns.target_weights()
    grids = columns.values("image_grids").reshape(-1, 3)
    mel_frames = columns.values("mel_frames")
    image_cu_seqlens = _offsets(grids.prod(axis=1))
    mel_cu_seqlens = _offsets(mel_frames)
    media = columns.media()
    num_patches = int(image_cu_seqlens[-1]) if "patches" in columns.names else 0
    num_frames = int(mel_cu_seqlens[-1]) if "mel" in columns.names else 0
    return PackedMicrobatch(
        sample_ids=_tensor(columns.values("sample_id"), np.int64),
        input_ids=_tensor(input_ids, np.int64),
        labels=_tensor(labels, np.int64),
        position_ids=_tensor(np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], lengths), np.int64),
        cu_seqlens=_tensor(cu_seqlens, np.int32),
        sample_segments=torch.arange(columns.num_rows, dtype=torch.int32),
        pack_offsets=_tensor(cu_seqlens, np.int32),
        patches=_rows(media["patches"], num_patches, patch_values, "patches"),
        image_grids=_tensor(grids, np.int32),
        image_sizes=_tensor(_image_sizes(columns), np.int32),
        image_cu_seqlens=_tensor(image_cu_seqlens, np.int32),
        mel=_rows(media["mel"], num_frames, mel_bins, "mel frames"),
        mel_frames=_tensor(mel_frames, np.int32),
        mel_cu_seqlens=_tensor(mel_cu_seqlens, np.int32),
        images_per_sample=_tensor(_entries(columns, "image_grids"), np.int32),
        recordings_per_sample=_tensor(_entries(columns, "mel_frames"), np.int32),
        num_targets=int(np.count_nonzero(labels != LABEL_IGNORED)),
        target_weights=torch.from_numpy(np.empty(0, np.float32) if weights is None else _predicted(weights, cu_seqlens, 0)),
    )


def cumulative(lengths: Tensor) -> Tensor:
    """Return the (n + 1,) int32 offsets, from 0 to the sum, of (n,) integer lengths on the host."""
    return torch.from_numpy(_offsets(lengths.numpy()))


def sums(values: Tensor, cu_lengths: Tensor) -> Tensor:
    """Return the (n,) sums of the values between consecutive offsets `cu_lengths` (n + 1,), on the host as they are."""
    upto = cumulative(values)
    return upto[cu_lengths[1:].long()] - upto[cu_lengths[:-1].long()]


def places(lengths: Tensor) -> Tensor:
    """Return the place of each element in its segment, (sum of the lengths,), from the (n,) lengths of the segments."""
    return torch.arange(int(lengths.sum())) - torch.repeat_interleave(cumulative(lengths)[:-1], lengths)


def _offsets(lengths: NDArray[np.integer]) -> NDArray[np.int32]:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _tensor(values: NDArray[np.integer], dtype: type[np.integer]) -> Tensor:
    """Convert to a tensor, copying arrays that are read-only: they are views of Arrow memory, which must not be written to."""
    return torch.from_numpy(values.astype(dtype, copy=not values.flags.writeable))


def _token_lengths(columns: Columns) -> NDArray[np.int32]:
    """Return the (n,) token counts per sample, zeros without token columns. Raises HeadraceError if ids and labels differ."""
    lengths = [columns.lengths(name) for name in ("input_ids", "labels") if name in columns.names]
    if len(lengths) == 2 and not np.array_equal(lengths[0], lengths[1]):
        raise HeadraceError("a payload batch has samples with different numbers of input_ids and labels")
    return lengths[0] if lengths else _entries(columns, "input_ids")


def _check_tokens(
    input_ids: NDArray[np.integer], vocab_size: int, sample_ids: NDArray[np.integer], cu_seqlens: NDArray[np.int32]
) -> None:
    """Raise UserError for a token outside of the vocabulary.

    On the device it would show only as a failed embedding lookup, after which the process can no longer use its GPU.
    """
    if len(input_ids) and int(input_ids.max()) >= vocab_size:
        place = int(np.argmax(input_ids >= vocab_size))
        sample = int(sample_ids[np.searchsorted(cu_seqlens, place, side="right") - 1])
        raise UserError(
            f"sample {sample} has the token {int(input_ids[place])}, but the model's vocabulary ends with {vocab_size - 1}: give "
            "every preprocessor the tokenizer that the job had when it was submitted (text.tokenizer)"
        )


def _entries(columns: Columns, name: str) -> NDArray[np.int32]:
    """Return the (n,) numbers of entries per sample in a list column; zeros if the column is missing."""
    return columns.lengths(name) if name in columns.names else np.zeros(columns.num_rows, np.int32)


def _image_sizes(columns: Columns) -> NDArray[np.integer]:
    """Return the (I, 2) sizes of all images and their tiles; (0, 2) without the column."""
    known = _entries(columns, "image_sizes").any()
    return columns.values("image_sizes").reshape(-1, 2) if known else np.empty((0, 2), np.int32)


def _predicted(values: NDArray[_Number], cu_seqlens: NDArray[np.int32], last: int) -> NDArray[_Number]:
    """Shift values one to the left inside every sample, to the position that predicts their token; its last one gets `last`."""
    shifted = np.empty_like(values)
    shifted[:-1] = values[1:]
    if len(values):
        shifted[cu_seqlens[1:][np.diff(cu_seqlens) > 0] - 1] = last
    return shifted


def _rows(values: Tensor, num_rows: int, empty_width: int, what: str) -> Tensor:
    if (num_rows == 0 and len(values)) or (num_rows and (len(values) == 0 or len(values) % num_rows)):
        raise HeadraceError(f"a payload batch has {len(values)} values for {num_rows} {what}, which is no whole number of rows")
    return values.view(num_rows, -1) if num_rows else values.view(0, empty_width)
