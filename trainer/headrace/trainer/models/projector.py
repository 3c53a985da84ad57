"""Projection of encoder features to LLM tokens: neighbours are concatenated and mapped by an MLP (Qwen2-VL's patch merger)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.trainer.loading.collate import PackedMicrobatch, cumulative, sums
from headrace.trainer.models.block import layer_norm


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """Where the features of packed segments go, so that each segment is whole groups. L: features."""

    num_rows: int
    """Number of rows with the padding."""
    rows: Tensor | None
    """(L,) int64: the row of each feature, all others being padding; None where no segment needs any."""


class Projector(nn.Module):
    """Projector: features (L, width_in) -> tokens (sum of ceil(length / group), width_out).

    Each `group` neighbours become one token. The last group of a segment is padded with zeros if it is incomplete, which it
    never is for images: their patches come in whole merge groups.
    """

    def __init__(self, *, width_in: int, group: int, width_out: int) -> None:
        super().__init__()
        self.group = group
        self.norm = layer_norm(width_in)
        self.up = nn.Linear(group * width_in, group * width_in)
        self.down = nn.Linear(group * width_in, width_out)

    def forward(self, features: Tensor, groups: Groups) -> Tensor:
        """Project all segments. `groups`: from `groups`, on the device of the features."""
        x = self.norm(features)
        if groups.rows is not None:
            x = x.new_zeros(groups.num_rows, x.shape[1]).index_copy(0, groups.rows, x)
        joined = x.view(-1, self.group * features.shape[1])
        output: Tensor = self.down(functional.gelu(self.up(joined)))
        return output

    def token_counts(self, lengths: Tensor) -> Tensor:
        """Return the (n,) numbers of tokens that segments of these (n,) lengths become."""
        return (lengths + self.group - 1) // self.group

    def image_groups(self, data: PackedMicrobatch) -> Any:
        """Return what `forward` takes besides the features of a microbatch's images, on the host."""
        return self.groups(data.image_cu_seqlens.diff())

    def image_token_counts(self, data: PackedMicrobatch) -> Tensor:
        """Return the (n,) numbers of tokens that the images of each sample become."""
        return sums(self.token_counts(data.image_cu_seqlens.diff()), cumulative(data.images_per_sample))

    def groups(self, lengths: Tensor) -> Groups:
        """Return the groups of segments of these (n,) lengths, on the host as they are."""
        padded = Projector.token_counts(self, lengths) * self.group
        if torch.equal(padded, lengths):
            return Groups(num_rows=int(lengths.sum()), rows=None)
        moved = cumulative(padded)[:-1] - cumulative(lengths)[:-1]
        rows = torch.arange(int(lengths.sum())) + torch.repeat_interleave(moved, lengths)
        return Groups(num_rows=int(padded.sum()), rows=rows)
