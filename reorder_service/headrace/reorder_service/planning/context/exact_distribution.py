"""The best distribution of blocks over ranks, by an integer program: for a few dozen blocks, and to judge the quick ways by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.reorder_service.planning.batch import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExactDistribution:
    """What the solver found in its time."""

    ranks: Ints | None
    """(n,) rank of each block; None if it found no distribution in time."""
    bound: float
    """Proved: in no distribution the heaviest rank has less work."""


def solve(
    work: Ints | Floats, num_ranks: int, *, most_blocks: int | None = None, time_limit_s: float = 60.0
) -> ExactDistribution:
    """Solve Cornstarch's equation 3.4 (dissertation, section 3.3.2.1): the least work of the heaviest of the ranks.

    most_blocks: that a rank takes, to which the equation is extended; None: any number of them. Block i stays among the first
    i + 1 ranks, as ranks are alike.

    Raises ValueError where the ranks have no room for the blocks.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # not at the top, so that planning need not load scipy
    from scipy.sparse import csr_array

    num_blocks, most = len(work), len(work) if most_blocks is None else most_blocks
    if num_ranks < 1 or most * num_ranks < num_blocks:
        raise ValueError(f"{num_blocks} blocks have no room on {num_ranks} ranks that take {most} each")
    scale = max(1.0, float(np.sum(work)))  # the solver's tolerances are absolute
    block, rank = np.divmod(np.arange(num_blocks * num_ranks), num_ranks)
    chosen, last = np.arange(block.size), block.size
    columns = np.append(chosen, np.full(num_ranks, last))
    rows = np.append(rank, np.arange(num_ranks))
    shape = (num_ranks, last + 1)
    loads = csr_array(
        (np.append(np.asarray(work, np.float64)[block] / scale, np.full(num_ranks, -1.0)), (rows, columns)), shape=shape
    )
    counts = csr_array((np.ones(last), (rank, chosen)), shape=shape)
    once = csr_array((np.ones(last), (block, chosen)), shape=(num_blocks, last + 1))
    result = milp(
        c=np.append(np.zeros(last), 1.0),
        constraints=[
            LinearConstraint(once, 1, 1),
            LinearConstraint(loads, -np.inf, 0),
            LinearConstraint(counts, 0, most),
        ],
        integrality=np.append(np.ones(last), 0),
        bounds=Bounds(0, np.append((rank <= block).astype(np.float64), np.inf)),
        options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
    )
    found = None if result.x is None else result.x[:-1].reshape(num_blocks, num_ranks).argmax(axis=1)
    return ExactDistribution(ranks=found, bound=max(0.0, (result.mip_dual_bound or 0.0) * scale))
