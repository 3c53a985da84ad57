"""The samples of a plan in the order of their slots."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.jit import kernel


@kernel
def samples_by_slot(slots: NDArray[np.int64], num_slots: int) -> NDArray[np.int64]:
    """Return the (n,) samples in the order of their slots (or of their replicas, or bins), by a stable counting sort."""
    first = np.zeros(num_slots + 1, np.int64)
    for slot in slots:
        first[slot + 1] += 1
    for slot in range(num_slots):
        first[slot + 1] += first[slot]
    layout = np.empty(slots.size, np.int64)
    for i in range(slots.size):
        layout[first[slots[i]]] = i
        first[slots[i]] += 1
    return layout
