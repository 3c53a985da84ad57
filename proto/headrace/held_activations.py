"""What a stage holds along its actions: the sum that the simulator foretells is the one that the trainer keeps to a limit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.schedule import ZERO_BUBBLE, Kind


def held(kinds: NDArray[np.int64], takes: NDArray[np.float64], gives: NDArray[np.float64], until: Kind) -> NDArray[np.float64]:
    """(..., A) what a stage holds after each of its A actions: the most of it, while they run.

    kinds: (A,) of the actions, in order. takes, gives: (..., A) what the action's microbatch takes when it goes forth, and gives
    back after its action of kind `until`; the two differ where samples are deferred.
    """
    change = np.where(kinds == Kind.FORWARD, takes, 0.0) - np.where(kinds == until, gives, 0.0)
    kept: NDArray[np.float64] = np.maximum(np.cumsum(change, axis=-1), 0.0)  # a sum of floats may end below 0
    return kept


def held_until(schedule: str, *, has_weights: bool) -> Kind:
    """Which action gives back what a forward took. has_weights: whether the stage computes gradients of weights.

    After a backward that put them off, a linear layer still has its input and the gradient of its output. In a transformer layer
    that is as much as the forward kept (32 bytes per position and width, Korthikanti et al. 2022, less what grouped queries
    save), so nothing is counted as given back before the weights' own action. With activation checkpointing it is more than the
    forward kept, which this sum does not know.
    """
    return Kind.WEIGHT if schedule == ZERO_BUBBLE and has_weights else Kind.BACKWARD
