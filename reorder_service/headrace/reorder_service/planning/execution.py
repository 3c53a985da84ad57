"""How a pipeline executes a plan: what the planner must know about the pipeline besides its topology."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from headrace.backward_factors import WEIGHT_GRADIENTS
from headrace.held_activations import freed_by
from headrace.reorder_service.planning.post_balancing_options import PostBalancing
from headrace.reorder_service.planning.sharing import Sharing
from headrace.reorder_service.planning.stratification_options import Stratification
from headrace.schedule import SCHEDULES, ZERO_BUBBLE, Kind

BACKWARD_FACTOR = 2.0  # the gradients of inputs and of weights each take one matrix product per matrix product of the forward
_MOST_FACTOR, _MOST_LATENCY_S = 1e3, 1e9  # keep a step's time finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How a pipeline executes a plan: schedule, cost of the backward, links between stages, memory limit.

    The defaults describe an ideal 1F1B pipeline: transfers take no time and memory is unlimited.
    """

    colocated: Literal["", "microbatch", "step", "phases"] = ""
    """Empty for a pipeline. Otherwise every rank has all units, and ranks meet at every microbatch, once a step, or behind every
    unit of a microbatch, where samples may change their rank."""
    cp: int | Literal["auto"] = 1
    """How many neighbouring ranks share a sequence of the LLM, where ranks meet behind every unit; "auto": chosen for each."""
    max_tokens: int | None = None
    """Most tokens of a microbatch of a colocated rank; None means no limit."""
    schedule: str = "1f1b"
    """Name of the pipeline schedule, one of `headrace.schedule.SCHEDULES`."""
    chunks: int = 1
    """Number of model parts on each stage under interleaved 1F1B; 1 for every other schedule."""
    in_flight: int | None = None
    """Most microbatches that a stage may hold between their forward and their backward, with eager-forward 1F1B only.

    None means as many as a plan's activations leave within `memory_limit`.
    """
    split_backward: bool = True
    """Whether a unit runs the backward of a deferred sample when its gradient arrives, apart from the rest of its microbatch."""
    backward_factors: Mapping[str, float] = field(default_factory=dict)
    """Ratio of backward to forward time, by unit; a unit that is not named has BACKWARD_FACTOR.

    0 marks a frozen unit that has no backward at all.
    """
    weight_gradient_factors: Mapping[str, float] = field(default_factory=dict)
    """Ratio of the time for weight gradients to forward time, by unit: the part of a backward that 'zero-bubble' puts off.

    A unit that is not named has WEIGHT_GRADIENTS, but not more than its whole backward.
    """
    microbatch_s: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Seconds that a microbatch takes in all stages of a unit together, besides those of its samples, indexed by Kind."""
    stage_loads: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    """Time of each stage of a unit over an even share, one entry a Kind; a unit that is not named has even stages."""
    exchange_s: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By unit, the seconds in which its replicas exchange weights before its first microbatch, and gradients after its last one.

    Other units may compute meanwhile. The searches for an order do not look at them; simulated times do.
    """
    latency_s: float = 0.0
    """Latency of one transfer between two stages."""
    bytes_per_s: float = math.inf
    """Bandwidth of a link between two stages."""
    memory_limit: float = math.inf
    """Most activations that a stage can hold, in the unit of `Batch.memory`."""
    may_cross_replicas: bool = False
    """Whether different units may process a sample on different replicas.

    If not, strategy `auto` rejects plans that need it: replicas that share no unit cannot run them.
    """
    unit_replicas: Mapping[str, int] = field(default_factory=dict)
    """Number of replicas of the units that have another number than the LLM, which has `topology.replicas`."""
    sharing: Sharing | None = None
    """The units on the LLM's ranks; None if every unit has ranks of its own. Searches for an order take them to have; predicted
    times, by which `auto` chooses, do not."""
    stratification: Stratification = field(default_factory=Stratification)
    """How samples are assigned to microbatches by strategy `entrain`, and by no other."""
    post_balancing: PostBalancing = field(default_factory=PostBalancing)
    """How strategy `orchmllm` balances the units, and how many replicas share a node."""

    def __post_init__(self) -> None:
        if self.cp != 1 and self.colocated != "phases":
            raise ValueError(f"cp is for ranks that meet behind every unit, got {self.cp}")
        if self.max_tokens is not None and (self.max_tokens < 1 or not self.colocated):
            raise ValueError(f"max_tokens must be at least 1, and is for colocated ranks only, got {self.max_tokens}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"no schedule {self.schedule!r}; there are {', '.join(SCHEDULES)}")
        if self.chunks < 1 or (self.chunks > 1 and self.schedule != "interleaved"):
            raise ValueError(
                f"chunks must be at least 1, and more only with 'interleaved', got {self.chunks} with {self.schedule!r}"
            )
        if self.in_flight is not None and (self.in_flight < 1 or self.schedule != "eager"):
            raise ValueError(f"in_flight must be at least 1, and only with 'eager', got {self.in_flight} with {self.schedule!r}")
        wrong = {unit: factor for unit, factor in self.backward_factors.items() if not (0 <= factor <= _MOST_FACTOR)}
        if wrong:
            raise ValueError(f"backward factors must be from 0 to {_MOST_FACTOR:g}, got {wrong}")
        wrong = {
            unit: part for unit, part in self.weight_gradient_factors.items() if not (0 <= part <= self.backward_factor(unit))
        }
        if wrong:
            raise ValueError(f"the weights' part of a backward must be from 0 to the backward's own factor, got {wrong}")
        if any(replicas < 1 for replicas in self.unit_replicas.values()) or (self.unit_replicas and self.colocated):
            raise ValueError(f"unit_replicas must be at least 1, and are for pipelines only, got {dict(self.unit_replicas)}")
        if not all(0 <= seconds < math.inf for of_unit in self.exchange_s.values() for seconds in of_unit):
            raise ValueError(f"exchange_s must be finite and not negative, got {dict(self.exchange_s)}")
        if not (0 <= self.latency_s <= _MOST_LATENCY_S and self.bytes_per_s >= 1 and self.memory_limit > 0):
            raise ValueError(
                f"latency_s must be from 0 to {_MOST_LATENCY_S:g}, bytes_per_s at least 1 and memory_limit positive, "
                f"got {self.latency_s}, {self.bytes_per_s} and {self.memory_limit}"
            )

    def backward_factor(self, unit: str) -> float:
        """Return the ratio of a unit's whole backward, inputs and weights together, to its forward."""
        return self.backward_factors.get(unit, BACKWARD_FACTOR)

    def step_factor(self, unit: str) -> float:
        """Return the ratio of a unit's forward and backward together to its forward."""
        return 1.0 + self.backward_factor(unit)

    def factors(self, unit: str) -> tuple[float, float, float]:
        """Return the times of a unit's actions relative to its forward, indexed by `headrace.schedule.Kind`.

        The last, for weight gradients, is 0 unless the schedule is 'zero-bubble'.
        """
        backward = self.backward_factor(unit)
        weights = self.weight_gradient_factors.get(unit, min(WEIGHT_GRADIENTS, backward)) if self.schedule == ZERO_BUBBLE else 0.0
        return 1.0, backward - weights, weights

    def by_kind(self, unit: str, forward_s: float, backward_s: float) -> tuple[float, float, float]:
        """Return seconds of a unit's forward and whole backward as those of its actions, indexed by `headrace.schedule.Kind`."""
        _, backward, weights = self.factors(unit)
        later = weights / (backward + weights) if weights > 0 else 0.0
        return forward_s, backward_s * (1.0 - later), backward_s * later

    def freed_by(self, unit: str) -> Kind:
        """Return the kind of action after which a unit frees the activations of a microbatch."""
        return freed_by(self.schedule, has_weights=self.factors(unit)[Kind.WEIGHT] > 0)
