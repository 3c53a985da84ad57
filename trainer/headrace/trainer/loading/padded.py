"""Other forms of a packed microbatch: one padded row a sample, and labels that a model shifts itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.sample import LABEL_IGNORED


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaddedMicrobatch:
    """The tokens of a microbatch with a row for each of its n samples, padded at their ends to L tokens."""

    input_ids: Tensor
    """(n, L) int64; 0 in padding."""
    attention_mask: Tensor
    """(n, L) int64: 1 for a token of the sample, 0 for padding."""
    position_ids: Tensor
    """(n, L) int64: place in the sample; 0 in padding."""
    mrope_position_ids: Tensor
    """(3, n, L) int64, or (3, n, 0) unless the job has `mrope`."""
    labels: Tensor
    """(n, L) int64, shifted: `labels[i, t]` follows `input_ids[i, t]`, or is LABEL_IGNORED, as in padding."""

    target_weights: Tensor
    """(n, L) float32, aligned with `labels`: by how much the loss of each target counts, 0 where there is none; (n, 0) where each
    counts 1."""

    @property
    def unshifted_labels(self) -> Tensor:
        """(n, L) int64: `unshifted_labels[i, t]` is the label of token t itself, for models that shift labels, as those of
        Hugging Face do."""
        shifted = self.labels.roll(1, dims=1)
        shifted[:, :1] = LABEL_IGNORED
        return shifted


def unshifted(labels: Tensor, cu_seqlens: Tensor, first: int = LABEL_IGNORED) -> Tensor:
    """Return (T,) labels, or their weights, that stand at their own token, of such that stand at the token before.

    cu_seqlens: (s + 1,); first: what the first token of each segment gets.
    """
    moved = labels.roll(1)
    moved[cu_seqlens[:-1][cu_seqlens.diff() > 0].to(labels.device, torch.int64, non_blocking=True)] = first
    return moved


def padded_rows(
    values: dict[str, Tensor], cu_seqlens: Tensor, segments: Tensor, fills: dict[str, int], multiple: int
) -> dict[str, Tensor]:
    """Return each of `values`, (..., T), as rows (..., n, L): row i has the tokens of segment `segments[i]`, then its fill.

    L is the longest of those segments, rounded up to a `multiple`. cu_seqlens: (s + 1,) and segments: (n,), on the host.
    """
    starts, lengths = cu_seqlens[:-1][segments].long(), cu_seqlens.diff()[segments].long()
    longest = -(-int(lengths.max()) // multiple) * multiple if len(lengths) else 0
    inside = torch.arange(longest) < lengths[:, None]
    at = (starts[:, None] + torch.arange(longest)).where(inside, 0)
    rows = {}
    for name, tensor in values.items():
        if not tensor.shape[-1] or not longest:
            rows[name] = tensor.new_full((*tensor.shape[:-1], len(lengths), 0), fills[name])
            continue
        device = tensor.device
        taken = tensor[..., at.to(device, non_blocking=True)]
        rows[name] = taken.masked_fill(~inside.to(device, non_blocking=True), fills[name])
    return rows
