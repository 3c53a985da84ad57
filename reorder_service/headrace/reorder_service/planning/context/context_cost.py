"""What a sequence takes on so many ranks of context parallelism, forward and backward together.

Keys and values of all tokens are gathered on every rank (Cornstarch's dissertation, section 3.4.3): those of the next heads while
attention of these is computed, so that only the longer of the two is seen. Everything else divides by the ranks, in whole blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

from headrace.reorder_service.planning.batch import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCost:
    """Seconds of all layers of one model on one kind of rank. Raises ValueError for a number that cannot be."""

    token_s: float
    """Of one token, in all but attention."""
    pair_s: float
    """Of one pair of a query and a key that it sees."""
    gather_s: float
    """Of one token's keys and values, from another rank of the node, and of their gradients back."""
    far_gather_s: float
    """The same where the ranks lie on several nodes."""
    start_s: float = 0.0
    """Latency of the exchanges of one sequence, which one rank alone has not."""
    ranks_per_node: int = 8
    block: int = 128
    """Tokens of a block."""

    def __post_init__(self) -> None:
        for one in fields(self):
            number, least = getattr(self, one.name), 1 if one.name in ("ranks_per_node", "block") else 0
            if not least <= number < math.inf:
                raise ValueError(f"{one.name} of the cost of context parallelism must be at least {least}, got {number}")

    def seconds(self, tokens: Ints, pairs: Ints | Floats, num_ranks: int) -> Floats:
        """Return (n, num_ranks) seconds of n sequences on 1, 2, ... ranks; infinite where a rank would have no block.

        tokens: (n,) positive. pairs: (n,) pairs of tokens that their masks let see each other.
        """
        degrees = np.arange(1, num_ranks + 1)
        length, seen = np.asarray(tokens, np.float64)[:, None], np.asarray(pairs, np.float64)[:, None]
        blocks = -(-np.asarray(tokens, np.int64)[:, None] // self.block)
        share = -(-blocks // degrees) / blocks
        speed = np.where(degrees <= self.ranks_per_node, self.gather_s, self.far_gather_s)
        gathering = length * (1.0 - 1.0 / degrees) * speed
        whole = self.token_s * length * share + np.maximum(self.pair_s * seen * share, gathering)
        return np.where(degrees <= blocks, whole + np.where(degrees > 1, self.start_s, 0.0), np.inf)
