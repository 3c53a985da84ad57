"""What the compute units of one device make of its share of attention.

A kernel gives each block of queries to one compute unit, and the next head's kernel starts after the last of them. The longest
block of a head keeps all others waiting. Cut into subblocks of at most so many blocks of keys, which are joined by their log-sum-
exp, the work is level inside the device, too (Cornstarch's dissertation, section 3.3.2.2).
"""

from __future__ import annotations

import numpy as np

from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.search.number_partition import lpt


def subblocks(touched: Ints, width: int) -> tuple[Ints, Ints]:
    """Cut the keys of n blocks of queries into subblocks of at most `width` blocks of keys, as equal as can be.

    touched: (n,) blocks of keys that each block of queries sees. Returns the block of queries of each subblock, rising, and how
    many blocks of keys it has.
    """
    if width < 1:
        raise ValueError(f"a subblock has at least one block of keys, got a width of {width}")
    parts = -(-np.asarray(touched, np.int64) // width)
    owner = np.repeat(np.arange(parts.size), parts)
    place = np.arange(owner.size) - np.repeat(np.cumsum(parts) - parts, parts)
    least, more = np.divmod(np.asarray(touched, np.int64)[owner], parts[owner])
    return owner, least + (place < more)


def kernel_time(touched: Ints, num_units: int, *, width: int | None = None, joining: float = 0.0) -> float:
    """Return the time of one kernel of attention on a device of so many compute units, in units of one block of keys.

    width: of subblocks; None: a block of queries is not cut. joining: time to write the result of one subblock and to read it
    again, in a kernel of its own for all subblocks of a block of queries; blocks that are not cut have none.
    """
    if num_units < 1:
        raise ValueError(f"a device has at least one compute unit, got {num_units}")
    if width is None:
        return _in_turn(np.asarray(touched, np.float64), num_units)
    owner, sizes = subblocks(touched, width)
    parts = np.bincount(owner, minlength=len(touched))
    return _in_turn(sizes.astype(np.float64), num_units) + _in_turn(joining * np.where(parts > 1, parts, 0), num_units)


def _in_turn(weights: Floats, num_units: int) -> float:
    """Return when the last unit is done if each takes the next piece of work as soon as it is free."""
    units = lpt(weights, np.arange(weights.size), num_units)
    return float(np.bincount(units, weights=weights, minlength=num_units).max())
