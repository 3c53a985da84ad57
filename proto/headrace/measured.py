"""What a trainer rank has measured of a step: when it computed what, and for how long."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from headrace.schedule import Kind

ALL_UNITS = ""
"""The unit of what a rank with all units measures: forward and backward of a microbatch in all of them together."""


class Ran(NamedTuple):
    """An action as it ran."""

    microbatch: int
    chunk: int
    begin_s: float
    """Its begin on a clock of the host. Where it waits for messages or data on its way, all of that is put before it."""
    seconds: float
    """How long it computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredWork:
    """One stage's actions of one kind in a step, without waiting for messages or data: parallel sequences in order of time.

    A rank that has all units reports them together, as the forward of unit ALL_UNITS at stage 0.
    """

    unit: str
    replica: int
    """Replica of the unit."""
    stage: int
    kind: Kind
    microbatches: Sequence[int]
    """Index of the microbatch of each action that has computed something; an older trainer has added up those of all chunks."""
    seconds: Sequence[float]
    chunks: Sequence[int] = ()
    """Chunk of the stage of each action; empty: 0 in all."""
    begins_s: Sequence[float] = ()
    """Begin of each action (`Ran.begin_s`) in seconds since `origin_unix_s`; empty: not measured."""
    origin_unix_s: float = math.nan
    """Unix time of the host's clock."""
    reduction_begin_s: float = math.nan
    """When the stage began to wait behind its last action for the sums of its gradients over replicas, since `origin_unix_s`; of
    the last kind of its works alone. NaN: not measured, or nothing to wait for."""
    reduction_s: float = 0.0
    """How long that took."""

    @classmethod
    def of(cls, actions: Iterable[Ran], clock_unix_s: float, *, unit: str, replica: int, stage: int, kind: Kind) -> Self:
        """Return the work of at least one action. clock_unix_s: Unix time at 0 of the clock of their begins."""
        ran = sorted(actions, key=lambda action: action.begin_s)
        return cls(
            unit=unit,
            replica=replica,
            stage=stage,
            kind=kind,
            microbatches=tuple(action.microbatch for action in ran),
            seconds=tuple(action.seconds for action in ran),
            chunks=tuple(action.chunk for action in ran) if any(action.chunk for action in ran) else (),
            begins_s=tuple(action.begin_s - ran[0].begin_s for action in ran),
            origin_unix_s=clock_unix_s + ran[0].begin_s,
        )
