"""Activation memory that a stage holds over its schedule, by one sum for the simulator's prediction and the trainer's limit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.schedule import ZERO_BUBBLE, Kind


def activation_memory(
    kinds: NDArray[np.int64], takes: NDArray[np.float64], gives: NDArray[np.float64], until: Kind
) -> NDArray[np.float64]:
    """Return (..., A) the activation memory that a stage holds after each of its A actions; its maximum is the stage's peak.

    kinds: (A,) kinds of the actions, in order. takes, gives: (..., A) amounts, in any unit, that the action's microbatch takes in
    its forward and gives back after its action of kind `until`; the two differ where samples are deferred to another microbatch.
    """
    change = np.where(kinds == Kind.FORWARD, takes, 0.0) - np.where(kinds == until, gives, 0.0)
    kept: NDArray[np.float64] = np.maximum(np.cumsum(change, axis=-1), 0.0)  # a sum of floats may end below 0
    return kept


def freed_by(schedule: str, *, has_weights: bool) -> Kind:
    """Return the kind of action after which a stage frees the activations of a forward. has_weights: whether the stage computes
    gradients of weights.

    After a backward that delayed the weight gradients, a linear layer still holds its input and the gradient of its output. In a
    transformer layer that is as much as the forward kept (32 bytes per position and width, Korthikanti et al. 2022, less what
    grouped queries save), so nothing counts as freed before the weight action. With activation checkpointing it is more than the
    forward kept, which this sum does not account for.
    """
    return Kind.WEIGHT if schedule == ZERO_BUBBLE and has_weights else Kind.BACKWARD
