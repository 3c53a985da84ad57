"""Projection of encoder features to LLM tokens: neighbours are concatenated and mapped by an MLP (Qwen2-VL's patch merger)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.trainer.loading.collate import cumulative


class Projector(nn.Module):
    """Projector: features (L, width_in) -> tokens (sum of ceil(length / group), width_out).

    Each `group` neighbours become one token. The last group of a segment is padded with zeros if it is incomplete, which it
    never is for images: their patches come in whole merge groups.
    """

    def __init__(self, *, width_in: int, group: int, width_out: int) -> None:
        super().__init__()
        self.group = group
        self.norm = nn.LayerNorm(width_in)
        self.up = nn.Linear(group * width_in, group * width_in)
        self.down = nn.Linear(group * width_in, width_out)

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Project all segments. `lengths`: (n,) of the segments, on the host."""
        joined = self._pad_groups(self.norm(features), lengths).view(-1, self.group * features.shape[1])
        output: Tensor = self.down(functional.gelu(self.up(joined)))
        return output

    def token_counts(self, lengths: Tensor) -> Tensor:
        """Return the (n,) numbers of tokens that segments of these (n,) lengths become."""
        return (lengths + self.group - 1) // self.group

    def _pad_groups(self, x: Tensor, lengths: Tensor) -> Tensor:
        padded = self.token_counts(lengths) * self.group
        if torch.equal(padded, lengths):
            return x
        moved = cumulative(padded)[:-1] - cumulative(lengths)[:-1]
        rows = torch.arange(len(x)) + torch.repeat_interleave(moved, lengths)
        return x.new_zeros(int(padded.sum()), x.shape[1]).index_copy(0, rows.to(x.device, non_blocking=True), x)
