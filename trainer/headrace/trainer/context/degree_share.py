"""A degree of context parallelism for each sequence of a microbatch: short ones on one rank, long ones on several.

All ranks run each layer once, on the tokens that they have of all sequences together. Attention of a sequence exchanges keys and
values among its own ranks alone, and not at all where one rank has it. Which ranks each sequence takes is planned before
(`headrace.reorder_service.planning.context.degree_plan`, docs/context.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from headrace.attention_mask import AttentionMask, Ints
from headrace.block_distribution import BLOCK
from headrace.errors import UserError
from headrace.trainer.context.context_share import ContextShare
from headrace.trainer.context.gathered_attention import AttentionBySequence, GatheredAttention
from headrace.trainer.context.rank_groups import RankGroups
from headrace.trainer.loading.token_shares import TokenShares


def share_by_degrees(
    mask: AttentionMask,
    bounds: Ints,
    ranks: Sequence[Sequence[int]],
    groups: RankGroups,
    *,
    block: int = BLOCK,
    heads_at_once: int = 1,
) -> ContextShare:
    """Make this process's share of n sequences that follow each other. All processes of `groups.group` call it alike.

    bounds: (n + 1,) places where sequences begin and end. ranks: those of each sequence, in the group. block, heads_at_once: as
    in `ContextShare.of`.

    Raises UserError, on all ranks, where a rank has no sequence or one that is not there, and for more ranks than a sequence has
    blocks.
    """
    own, size = dist.get_rank(groups.group), dist.get_world_size(groups.group)
    members = [tuple(sorted({int(rank) for rank in several})) for several in ranks]
    given = [list(several) for several in members]
    if len(given) != len(bounds) - 1 or not all(several and several[0] >= 0 and several[-1] < size for several in given):
        raise UserError(
            f"there are ranks {given} for {len(bounds) - 1} sequences on {size} ranks: give each sequence some of the ranks 0 to "
            f"{size - 1}"
        )
    if idle := sorted(set(range(size)) - {rank for several in members for rank in several}):
        raise UserError(
            f"rank {idle[0]} has none of the {len(members)} sequences, and would be missed in the layers' exchanges: give one of "
            "them more ranks, or put more sequences into a microbatch"
        )
    owners, masks, shares = np.zeros(mask.num_tokens, np.int64), [], []
    for several, first, end in zip(members, bounds[:-1], bounds[1:], strict=True):
        masks.append(AttentionMask(fields=mask.fields[first:end]))
        shares.append(TokenShares.of(masks[-1], len(several), block=block))
        owners[first:end] = np.array(several)[shares[-1].owners(np.arange(end - first))]
    whole = TokenShares(num_tokens=mask.num_tokens, num_ranks=size, ranks=owners, block=1)
    made = groups.of_sets(members)
    parts = tuple(
        GatheredAttention.of(masks[i], shares[i], made[several], heads_at_once=heads_at_once)
        for i, several in enumerate(members)
        if own in several
    )
    return ContextShare(
        shares=whole,
        group=groups.group,
        places=torch.from_numpy(whole.places(own)),
        attention=AttentionBySequence(parts=parts),
    )
