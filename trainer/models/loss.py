"""Cross entropy over the target tokens of a packed sequence, with a bound on the memory of the logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from headrace.sample import LABEL_IGNORED

MAX_LOGITS = 2**26  # 256 MiB in float32: 441 tokens of a vocabulary of 152,064


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepLoss:
    """The loss of one microbatch, not yet divided: sums over microbatches and ranks are the sums of the global batch."""

    loss_sum: Tensor
    """float32 scalar: sum over all targets."""
    num_targets: int
    """Text tokens that carry loss, and with a generator image tokens."""


def token_loss(hidden: Tensor, labels: Tensor, output_weight: Tensor, *, max_logits: int = MAX_LOGITS) -> Tensor:
    """Sum of the cross entropies at the positions whose label is not LABEL_IGNORED: float32 scalar.

    hidden: (T, width); labels: (T,) int64, `labels[t]` predicted from `hidden[t]`; output_weight: (vocab, width). Logits exist
    for at most `max_logits / vocab` tokens at a time; where that is less than all, the backward pass computes them anew.
    """
    rows = (labels != LABEL_IGNORED).nonzero().squeeze(1)
    targets = labels[rows]
    chunk = max(1, max_logits // output_weight.shape[0])
    if len(rows) <= chunk:
        return _chunk_loss(hidden[rows], targets, output_weight)
    total = torch.zeros((), device=hidden.device)
    for hidden_part, targets_part in zip(torch.split(hidden[rows], chunk), torch.split(targets, chunk), strict=True):
        part = checkpoint(_chunk_loss, hidden_part, targets_part, output_weight, use_reentrant=False)
        total = total + part
    return total


def _chunk_loss(hidden: Tensor, targets: Tensor, output_weight: Tensor) -> Tensor:
    logits = functional.linear(hidden, output_weight)
    return functional.cross_entropy(logits.float(), targets, reduction="sum")
