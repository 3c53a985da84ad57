"""What a trainer rank has measured of a step: the seconds of its computations, by unit, direction and microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.schedule import Kind

ALL_UNITS = ""
"""The unit of what a rank with all units measures: forward and backward of a microbatch in all of them together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredWork:
    """The seconds of one stage's actions of one kind in a step, without waiting for messages or data.

    A rank that has all units reports them together, as the forward of unit ALL_UNITS at stage 0.
    """

    unit: str
    replica: int
    """Replica of the unit."""
    stage: int
    kind: Kind
    microbatches: Sequence[int]
    """Indices of the microbatches in which the stage has computed something."""
    seconds: Sequence[float]
    """The seconds of each, over all chunks of the stage."""
