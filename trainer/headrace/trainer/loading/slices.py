"""Context-parallel slices: which rows of a microbatch each process takes, and the padding that makes the slices equally long.

Labels are shifted before the cut, and positions stay those of the whole sequence, so a process needs nothing of its neighbours
for its loss and its rotary embedding. Only attention crosses slices; its kernel gets the whole microbatch's `cu_seqlens`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.errors import UserError
from headrace.manifest import Vocabulary
from headrace.sample import LABEL_IGNORED
from headrace.spec import JobSpec
from headrace.trainer.loading.collate import PackedMicrobatch, cumulative, places

SliceOrder = Callable[[Tensor, int], Tensor]
"""Function (cu_seqlens, size) -> (size, T / size) int64 row indices: row r of the result lists the tokens that rank r takes.

cu_seqlens: (s + 1,) int32 offsets of the segments on the host, where T = cu_seqlens[-1] is a multiple of `size`. Every token is
listed once. It is called in every process, and must give all of them the same.
"""


def contiguous(cu_seqlens: Tensor, size: int) -> Tensor:
    """Rank r takes the r-th part of all tokens, as Ulysses (arXiv:2309.14509) has them."""
    return torch.arange(int(cu_seqlens[-1])).view(size, -1)


def zigzag(cu_seqlens: Tensor, size: int) -> Tensor:
    """Rank r takes chunks r and 2 size - 1 - r of each segment's 2 size chunks.

    Under causal attention all ranks then have equal work in every segment (Llama 3, arXiv:2407.21783, section 3.3.2). The lengths
    of segments are multiples of 2 size.
    """
    lengths = cu_seqlens.diff().long()
    chunk = places(lengths) // torch.repeat_interleave(lengths // (2 * size), lengths).clamp(min=1)
    owner = torch.minimum(chunk, 2 * size - 1 - chunk)
    return owner.argsort(stable=True).view(size, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced:
    """Ranks take blocks of tokens, so that the work of attention under the microbatch's mask is level, and tokens are equal.

    Each slice comes with the mask of the whole (`slice_mask`), by which `headrace.trainer.context` attends. What an image or a
    recording sees is one of `headrace.mask_layouts.Sight`: "itself", "before" or "text".
    """

    images: str = "itself"
    recordings: str = "itself"
    block: int = 128
    """Tokens of a block. Each rank has whole ones."""

    def __post_init__(self) -> None:
        for what, sight in {"images": self.images, "recordings": self.recordings}.items():
            if sight not in ("itself", "before", "text"):
                raise UserError(f"{what} of a balanced cp_order see {sight!r}: take itself, before or text")
        if self.block < 1:
            raise UserError(f"block of a balanced cp_order is {self.block}: a block has at least one token")

    def with_mask(self, data: PackedMicrobatch, spec: JobSpec, vocabulary: Vocabulary) -> PackedMicrobatch:
        """Return a whole microbatch, padded for its slices, with its mask. Raises UserError where it has none."""
        from headrace.mask_layouts import Sight  # loads numba, which other orders do without
        from headrace.trainer.loading.microbatch_mask import microbatch_mask

        if not len(data.input_ids):
            return data
        mask = microbatch_mask(
            data,
            image=spec.image,
            audio=spec.audio,
            image_token=vocabulary.image_token,
            audio_token=vocabulary.audio_token,
            images=Sight(self.images),
            recordings=Sight(self.recordings),
        )
        return replace(data, mask_fields=torch.from_numpy(mask.fields))

    def rows(self, data: PackedMicrobatch, size: int) -> Tensor:
        """Return the (size, T / size) rows of all ranks, of a microbatch `with_mask` or a slice of one."""
        from headrace.trainer.loading.microbatch_mask import slice_mask
        from headrace.trainer.loading.token_shares import TokenShares

        if not int(data.cu_seqlens[-1]):
            return torch.zeros(size, 0, dtype=torch.int64)
        return torch.from_numpy(TokenShares.of(slice_mask(data), size, block=self.block).in_order()).view(size, -1)


ORDERS: dict[str, SliceOrder | Balanced] = {"zigzag": zigzag, "contiguous": contiguous, "balanced": Balanced()}


def padded_to_slices(
    data: PackedMicrobatch, size: int, order: SliceOrder | Balanced, pad_to: int, token: int
) -> PackedMicrobatch:
    """Pad a whole microbatch, on the host, so that `size` ranks have equally many tokens: whole blocks, a multiple of `pad_to`.

    For `zigzag` each segment is padded at its own end: causal attention never reads from there. What else is missing is a
    segment, and a pack, of its own at the end. Padding has the id `token`, no targets, and positions that count on. A microbatch
    without tokens stays without.
    """
    num_tokens = len(data.input_ids)
    lengths = data.cu_seqlens.diff().long()
    parts = 2 * size if order is zigzag and size > 1 else 1
    longer = -(-lengths // parts) * parts
    unit = math.lcm(parts, size * pad_to, size * order.block if isinstance(order, Balanced) and size > 1 else 1)
    rest = -int(longer.sum()) % unit
    if not num_tokens or int(longer.sum()) + rest == num_tokens:
        return data
    starts = cumulative(longer)
    at = places(lengths) + torch.repeat_interleave(starts[:-1].long(), lengths)
    segment_of_pack = torch.searchsorted(data.cu_seqlens, data.pack_offsets, right=True) - 1
    if rest:
        longer = torch.cat((longer, torch.tensor([rest])))
    cu_seqlens = cumulative(longer)
    counted = places(longer)
    total = len(counted)

    def placed(values: Tensor, fill: Tensor) -> Tensor:
        return fill.index_copy(-1, at, values)

    mrope, weights = data.mrope_position_ids, data.target_weights
    return replace(
        data,
        input_ids=placed(data.input_ids, torch.full((total,), token)),
        labels=placed(data.labels, torch.full((total,), LABEL_IGNORED)),
        target_weights=placed(weights, torch.zeros(total)) if len(weights) else weights,
        position_ids=placed(data.position_ids, counted),
        mrope_position_ids=placed(mrope, counted.repeat(3, 1)) if mrope.shape[1] else mrope,
        cu_seqlens=cu_seqlens,
        pack_offsets=torch.cat((starts[segment_of_pack], cu_seqlens[-1:] if rest else cu_seqlens[:0])),
    )


def rows_of_slices(data: PackedMicrobatch, size: int, order: SliceOrder | Balanced) -> Tensor:
    """Return the (size, T / size) rows of all ranks, of a microbatch that is padded for them.

    Raises UserError where the order does not give every token to one rank, and equally many to all.
    """
    num_tokens = int(data.cu_seqlens[-1])
    rows = order.rows(data, size) if isinstance(order, Balanced) else order(data.cu_seqlens, size)
    if rows.shape != (size, num_tokens // size) or not torch.equal(rows.flatten().sort().values, torch.arange(num_tokens)):
        raise UserError(
            f"cp_order returned rows of shape {tuple(rows.shape)} for {num_tokens} tokens of {size} ranks: return (size, "
            "tokens / size) rows that list every token once"
        )
    return rows


def targets_of_slices(data: PackedMicrobatch, rows: Tensor) -> list[int]:
    """Return the number of targets of each rank's slice. `rows`: of `rows_of_slices`; the labels are on the host."""
    return (data.labels[rows] != LABEL_IGNORED).sum(dim=1).tolist() if len(data.labels) else [0] * len(rows)


def slice_of(data: PackedMicrobatch, rows: Tensor, num_targets: int) -> PackedMicrobatch:
    """Return the tokens in `rows` of a whole microbatch, on any device. `num_targets`: those of the slice."""
    if not len(data.input_ids):
        return data
    at = rows.to(data.input_ids.device, non_blocking=True)
    mrope, weights = data.mrope_position_ids, data.target_weights
    return replace(
        data,
        input_ids=data.input_ids[at],
        labels=data.labels[at] if len(data.labels) else data.labels,
        target_weights=weights[at] if len(weights) else weights,
        position_ids=data.position_ids[at],
        mrope_position_ids=mrope[:, at] if mrope.shape[1] else mrope,
        rows=rows,
        num_targets=num_targets,
    )
