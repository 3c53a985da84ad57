"""Attention over gloo groups of one to four processes: what each of them computes of a case."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from headrace.attention_mask import AttentionMask
from headrace.mask_layouts import AUDIO, TEXT, VISION, packed
from headrace.trainer.context.gathered_attention import GatheredAttention
from headrace.trainer.loading.token_shares import TokenShares

HEADS, WIDTH, BLOCK = 4, 6, 8
MASKS = {
    "causal": packed([[(TEXT, 90)]]),
    "prepended": packed([[(VISION, 20), (VISION, 9), (AUDIO, 11), (TEXT, 50)]]),
    "embedded": packed([[(TEXT, 13), (VISION, 24), (TEXT, 7), (AUDIO, 10), (VISION, 12), (TEXT, 30)]]),
    "packed": packed([[(TEXT, 17), (VISION, 12), (TEXT, 9)], [(TEXT, 23)], [(AUDIO, 11), (TEXT, 8)]], padding=13),
}


@dataclass(frozen=True, slots=True)
class Case:
    cp: int
    mask: str
    kv_heads: int
    heads_at_once: int
    is_level: bool = True
    """Whether blocks are dealt by their work; else the first rank has most of them."""
    dtype: str = "float32"

    def __str__(self) -> str:
        dealt = "" if self.is_level else ", uneven"
        return f"cp {self.cp}, {self.mask}, {self.kv_heads} heads, {self.heads_at_once} at once, {self.dtype}{dealt}"

    @property
    def shares(self) -> TokenShares:
        mask = MASKS[self.mask]
        if self.is_level:
            return TokenShares.of(mask, self.cp, block=BLOCK)
        ranks = np.zeros(-(-mask.num_tokens // BLOCK), np.int64)
        ranks[-2 * (self.cp - 1) :: 2] = np.arange(1, self.cp)
        return TokenShares(num_tokens=mask.num_tokens, num_ranks=self.cp, ranks=ranks, block=BLOCK)

    def inputs(self) -> tuple[list[Tensor], Tensor]:
        """q, k, v of the whole sequence, and by how much each element of the output counts."""
        num_tokens, generator = MASKS[self.mask].num_tokens, torch.Generator().manual_seed(self.cp)
        dtype = getattr(torch, self.dtype)
        q, k, v, weights = (
            torch.randn(num_tokens, heads, WIDTH, generator=generator).to(dtype)
            for heads in (HEADS, self.kv_heads, self.kv_heads, HEADS)
        )
        return [q, k, v], weights


FEW = [
    Case(1, "packed", 2, 1),
    *(Case(cp, mask, (4, 2, 1)[(cp + n) % 3], 1 + (cp + n) % 2) for cp in (2, 3, 4) for n, mask in enumerate(MASKS)),
    Case(3, "embedded", 2, 1, is_level=False),
    Case(2, "packed", 1, 1, is_level=False),
    Case(2, "embedded", 2, 1, dtype="bfloat16"),
]
"""Each mask with each number of ranks, heads in turns."""
ALL = [
    Case(*drawn)
    for drawn in itertools.product((1, 2, 3, 4), MASKS, (1, 2, 4), (1, 3), (True, False))
    if drawn[0] > 1 or drawn[-1]
]


def computed(case: Case, group: dist.ProcessGroup, rank: int) -> list[Tensor]:
    """This rank's rows of the output, and of the gradients of q, k and v."""
    mask, shares = MASKS[case.mask], case.shares
    places = torch.from_numpy(shares.places(rank))
    whole, weights = case.inputs()
    own = [x[places].requires_grad_() for x in whole]
    attend = GatheredAttention.of(mask, shares, group, heads_at_once=case.heads_at_once)
    output = attend(*own)
    return [output.detach(), *torch.autograd.grad((output * weights[places]).sum(), own)]


def joined(case: Case, of_ranks: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """What the ranks computed, as of the whole sequence."""
    parts = [torch.cat(several) for several in zip(*of_ranks, strict=True)]
    places = torch.from_numpy(np.concatenate([case.shares.places(rank) for rank in range(case.cp)]))
    return [torch.empty_like(part).index_copy_(0, places, part) for part in parts]


def mask_of(case: Case) -> AttentionMask:
    return MASKS[case.mask]
