"""FlexAttention under a mask of 64-bit fields: the map of blocks comes from the fields, and not from all pairs of tokens.

torch's own `create_block_mask` evaluates the rule for every pair. FlexAttention is compiled on GPUs; on CPUs torch has it without
a backward (`headrace.trainer.models.masked_attention` has one everywhere). The import costs 1.5 s, as it takes in the compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from headrace.attention_mask import (
    ALL_GROUPS_BIT,
    GROUP_BIT,
    MOST_GROUPS,
    MOST_MODALITIES,
    MOST_SEGMENTS,
    OWN_BIT,
    PARTLY,
    SEGMENT_BIT,
    WHOLE_GROUP_BIT,
    WHOLLY,
    AttentionMask,
    Ints,
)
from headrace.block_distribution import BLOCK
from headrace.trainer.models.masked_attention import rows_of_blocks

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def flex_mask(
    mask: AttentionMask, *, block: int = BLOCK, chosen: Ints | None = None, device: torch.device | str = "cpu"
) -> BlockMask:
    """Return FlexAttention's form of a mask, made once per microbatch for all layers.

    chosen: numbers of the blocks of queries, in the order of their rows; None: all of them. A rank whose last block of the
    sequence is short must have it last.
    """
    kinds = mask.block_map(block, chosen)
    places = rows_of_blocks(mask.num_tokens, block, chosen)
    if mask.num_tokens % block:  # the kernel compares what lies behind the end with the rule
        numbers = np.arange(len(kinds)) if chosen is None else np.asarray(chosen)
        kinds[:, -1] = np.minimum(kinds[:, -1], PARTLY)
        kinds[numbers == kinds.shape[1] - 1] = np.minimum(kinds[numbers == kinds.shape[1] - 1], PARTLY)
    part, whole = (_listed(kinds == kind, device) for kind in (PARTLY, WHOLLY))
    return BlockMask.from_kv_blocks(
        *part,
        *whole,
        BLOCK_SIZE=block,
        mask_mod=_rule(torch.from_numpy(mask.fields).to(device), torch.from_numpy(places).to(device)),
        seq_lengths=(len(places), mask.num_tokens),
    )


def flex_masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """Return what `masked_attention` does, by FlexAttention. q: (T_q, H, D); k, v: (T, H_kv, D). Returns (T_q, H, D)."""
    mixed = _attend(q.is_cuda)(*(x.transpose(0, 1)[None] for x in (q, k, v)), block_mask=mask, enable_gqa=True)
    if not isinstance(mixed, Tensor):
        raise TypeError("flex_attention returned auxiliary outputs that were not asked for")
    return mixed[0].transpose(0, 1)


@functools.cache
def _attend(is_cuda: bool) -> Any:
    return torch.compile(flex_attention, dynamic=False) if is_cuda else flex_attention


def _listed(chosen: np.ndarray[Any, Any], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return the (1, 1, Q) number of chosen blocks in each row of a (Q, K) matrix, and (1, 1, Q, K) which they are, first."""
    columns = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    counts = torch.from_numpy(chosen.sum(axis=1, dtype=np.int32))
    return counts[None, None].to(device), torch.from_numpy(columns)[None, None].to(device)


def _rule(fields: Tensor, places: Tensor) -> Rule:
    """Return the rule of `headrace.attention_mask` as FlexAttention asks for it, of one query and one key."""

    def seen(_batch: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        place = places[row]
        query, key = fields[place], fields[column]
        of_segment = ((query ^ key) >> SEGMENT_BIT & MOST_SEGMENTS == 0) & (query >> SEGMENT_BIT & MOST_SEGMENTS != 0)
        of_modality = query >> (key >> OWN_BIT & MOST_MODALITIES - 1) & 1 != 0
        group = key >> GROUP_BIT & MOST_GROUPS
        own_group = group == query >> GROUP_BIT & MOST_GROUPS
        of_group = (query >> ALL_GROUPS_BIT & 1 != 0) | (group == 0) | own_group
        whole_group = (query >> WHOLE_GROUP_BIT & 1 != 0) & own_group & (group > 0)
        return of_segment & of_modality & of_group & ((query >= 0) | (column <= place) | whole_group)

    return seen
