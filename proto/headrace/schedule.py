"""Who does what in which order: pipeline schedules as data. The simulator times them, the trainer executes them.

A schedule gives every stage of one replica its list of actions. A stage takes them strictly in order and waits for each
one's input: the forward of a microbatch comes from the stage before, its backward from the stage behind (on the last
stage: from its own forward). Schedules know neither times nor samples.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass


class Kind(enum.IntEnum):
    """What a stage does with a microbatch. The values index arrays of the simulator."""

    FORWARD = 0
    BACKWARD = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One step of one stage."""

    kind: Kind
    microbatch: int


Schedule = tuple[tuple[Action, ...], ...]
"""`schedule[stage]`: the actions of that stage, in order."""

Scheduler = Callable[[int, Sequence[int]], Schedule]
"""(number of stages, microbatches to run in order) -> schedule."""


def one_f_one_b(num_stages: int, microbatches: Sequence[int]) -> Schedule:
    """1F1B (PipeDream-Flush): stage s opens with S - 1 - s forwards, alternates forward and backward, and drains.

    `microbatches` are the indices of those that hold samples, in plan order: an empty microbatch is left out, so it
    costs neither time nor a message. With fewer microbatches than stages the early stages run all forwards first; with
    none, every stage has nothing to do.

    Raises ValueError if there is no stage or a microbatch stands twice.
    """
    if num_stages < 1:
        raise ValueError(f"a pipeline has at least one stage, got {num_stages}")
    if len(set(microbatches)) != len(microbatches):
        raise ValueError(f"a microbatch runs once, got {list(microbatches)}")
    return tuple(_one_f_one_b_stage(num_stages - 1 - stage, microbatches) for stage in range(num_stages))


def _one_f_one_b_stage(num_behind: int, microbatches: Sequence[int]) -> tuple[Action, ...]:
    forwards = [Action(kind=Kind.FORWARD, microbatch=m) for m in microbatches]
    backwards = [Action(kind=Kind.BACKWARD, microbatch=m) for m in microbatches]
    warm_up = min(num_behind, len(forwards))
    steady = len(forwards) - warm_up
    pairs = [action for pair in zip(forwards[warm_up:], backwards[:steady], strict=True) for action in pair]
    return (*forwards[:warm_up], *pairs, *backwards[steady:])
