"""How a plan is going to be run: what the planner must know about the pipeline besides its shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.backward import WEIGHT_GRADIENTS
from headrace.schedule import SCHEDULES, ZERO_BUBBLE

BACKWARD_FACTOR = 2.0  # gradients of inputs and of weights: two matrix products for each one of the forward
_MOST_FACTOR, _MOST_LATENCY_S = 1e3, 1e9  # a step's time stays a number


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Schedule, cost of the backward, links between stages, memory. The defaults are an ideal 1F1B pipeline."""

    schedule: str = "1f1b"
    """One of `headrace.schedule.SCHEDULES`."""
    chunks: int = 1
    """Parts of the model on each stage (interleaved 1F1B); 1 for every other schedule."""
    in_flight: int | None = None
    """Most microbatches between their forward and their backward on a stage (eager-forward 1F1B). None: no limit."""
    split_backward: bool = True
    """Whether a unit runs the backward of a deferred sample when its gradient comes, apart from the rest of its microbatch."""
    backward: Mapping[str, float] = field(default_factory=dict)
    """Time of a unit's backward over its forward; BACKWARD_FACTOR where a unit is not named. 0: frozen, nothing to do."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """The part of that for gradients of weights, which 'zero-bubble' computes later; WEIGHT_GRADIENTS, but not more than the
    backward has, where a unit is not named."""
    latency_s: float = 0.0
    """Of one transfer between two stages."""
    bytes_per_s: float = math.inf
    """Of a link between two stages."""
    memory_limit: float = math.inf
    """Most activations that a stage can hold, in the unit of the batch's `memory`."""
    crossing: bool = False
    """Whether samples may pass their units on different replicas. Strategy `auto` takes no plan in which they do where they may
    not: replicas that share no unit cannot run it."""

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"no schedule {self.schedule!r}; there are {', '.join(SCHEDULES)}")
        if self.chunks < 1 or (self.chunks > 1 and self.schedule != "interleaved"):
            raise ValueError(
                f"chunks must be at least 1, and more only with 'interleaved', got {self.chunks} with {self.schedule!r}"
            )
        if self.in_flight is not None and (self.in_flight < 1 or self.schedule != "eager"):
            raise ValueError(f"in_flight must be at least 1, and only with 'eager', got {self.in_flight} with {self.schedule!r}")
        wrong = {unit: factor for unit, factor in self.backward.items() if not (0 <= factor <= _MOST_FACTOR)}
        if wrong:
            raise ValueError(f"backward factors must be from 0 to {_MOST_FACTOR:g}, got {wrong}")
        wrong = {unit: part for unit, part in self.weights.items() if not (0 <= part <= self.backward_factor(unit))}
        if wrong:
            raise ValueError(f"the weights' part of a backward must be from 0 to the backward's own factor, got {wrong}")
        if not (0 <= self.latency_s <= _MOST_LATENCY_S and self.bytes_per_s >= 1 and self.memory_limit > 0):
            raise ValueError(
                f"latency_s must be from 0 to {_MOST_LATENCY_S:g}, bytes_per_s at least 1 and memory_limit positive, "
                f"got {self.latency_s}, {self.bytes_per_s} and {self.memory_limit}"
            )

    def backward_factor(self, unit: str) -> float:
        """Of all gradients, in one action or two."""
        return self.backward.get(unit, BACKWARD_FACTOR)

    def factors(self, unit: str) -> tuple[float, float, float]:
        """Time of a unit's actions over its forward, by `headrace.schedule.Kind`."""
        backward = self.backward_factor(unit)
        weights = self.weights.get(unit, min(WEIGHT_GRADIENTS, backward)) if self.schedule == ZERO_BUBBLE else 0.0
        return 1.0, backward - weights, weights
