"""Which tokens of a sequence each rank of a context-parallel group has: whole blocks of them, by their work under a mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from headrace.attention_mask import AttentionMask, Ints
from headrace.block_distribution import BLOCK, distribute
from headrace.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenShares:
    """A distribution of T tokens over ranks. All ranks make the same one, each for itself, from the same mask.

    Of a microbatch without tokens no rank has any. Raises UserError where a rank has no block, or a block no rank.
    """

    num_tokens: int
    num_ranks: int
    ranks: Ints
    """(blocks,) the rank of each block of tokens."""
    block: int = BLOCK
    """Tokens of a block; the last one of the sequence may be shorter."""

    def __post_init__(self) -> None:
        num_blocks = -(-self.num_tokens // self.block)
        if not num_blocks:
            return
        if self.num_ranks > num_blocks:
            raise UserError(
                f"cp {self.num_ranks} is more than the {num_blocks} blocks of the sequence, so that a rank would have none: take "
                f"cp of at most {num_blocks}, or smaller blocks"
            )
        if self.ranks.shape != (num_blocks,) or set(np.unique(self.ranks).tolist()) != set(range(self.num_ranks)):
            raise UserError(
                f"blocks go to the ranks {np.unique(self.ranks).tolist()}, {self.ranks.size} in number: give each of the "
                f"{num_blocks} blocks to one of {self.num_ranks} ranks, and each rank some"
            )

    @classmethod
    def of(cls, mask: AttentionMask, num_ranks: int, *, block: int = BLOCK) -> Self:
        """Give the ranks equally many blocks, rounded up, and level work, by how many blocks each block sees.

        Raises UserError where there are fewer blocks than ranks, or no token sees another.
        """
        try:
            ranks = distribute(mask.touched_blocks(block), num_ranks) if mask.num_tokens else np.zeros(0, np.int64)
        except ValueError as err:
            raise UserError(str(err)) from err
        return cls(num_tokens=mask.num_tokens, num_ranks=num_ranks, ranks=ranks, block=block)

    @property
    def counts(self) -> Ints:
        """(G,) number of tokens of each rank."""
        return np.bincount(self._owners, minlength=self.num_ranks)

    @property
    def longest(self) -> int:
        """Number of tokens of the rank that has most: all ranks exchange as many rows, of which the last ones may be unused."""
        return int(self.counts.max())

    def blocks(self, rank: int) -> Ints:
        """Return the rising numbers of a rank's blocks."""
        return np.flatnonzero(self.ranks == rank)

    def places(self, rank: int) -> Ints:
        """Return the rising places of a rank's tokens in the sequence, which are the rows of its tensors."""
        return np.flatnonzero(self._owners == rank)

    def owners(self, places: Ints) -> Ints:
        """Return the ranks that have the tokens at these places."""
        return self.ranks[np.asarray(places, np.int64) // self.block]

    def in_order(self) -> Ints:
        """Return the (T,) places of all tokens, first those of rank 0, then those of rank 1, and so on."""
        return np.argsort(self._owners.astype(np.uint16), kind="stable")  # by radix, as they are 16 bits

    def rows(self) -> Ints:
        """Return the (T,) row that each token has among its rank's rows."""
        counts, rows = self.counts, np.empty(self.num_tokens, np.int64)
        rows[self.in_order()] = np.arange(self.num_tokens) - np.repeat(np.cumsum(counts) - counts, counts)
        return rows

    @property
    def _owners(self) -> Ints:
        return self.owners(np.arange(self.num_tokens))
