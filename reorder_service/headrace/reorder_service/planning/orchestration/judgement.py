"""What the judge says of a candidate: seconds of its steps, where its GPUs' time goes, their memory, and why it loses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from headrace.plan import LLM
from headrace.reorder_service.planning.batch import Floats
from headrace.reorder_service.planning.orchestration.candidate import Candidate
from headrace.reorder_service.planning.orchestration.cluster import Cluster

GIB = 2.0**30
MODEL, SLICES, WAITING, TRANSFERS, EXCHANGE, UPDATE, SERVICES, IDLE = (
    "model", "slices", "waiting", "transfers", "exchange", "update", "services", "idle",
)  # fmt: skip
PARTS: Mapping[str, str] = {
    MODEL: "the model's work",
    SLICES: "exchange and repeated work of tensor slices",
    WAITING: "waiting for other stages (bubbles)",
    TRANSFERS: "transfers between stages",
    EXCHANGE: "exchange of gradients and weights between replicas",
    UPDATE: "the optimizer",
    SERVICES: "services on the same processor cores",
    IDLE: "GPUs without a unit",
}
"""Where the time of all GPUs goes, in words."""
_LOSES: Mapping[str, str] = {
    SLICES: "tensor slices exchange and repeat {} of the work of its GPUs",
    WAITING: "its GPUs wait {} of the time for other stages",
    TRANSFERS: "transfers between stages take {} of the time",
    EXCHANGE: "replicas exchange gradients and weights {} of the time",
    IDLE: "{} of the cluster's GPUs have no unit",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Most bytes that the GPUs of one stage of a unit hold, by what they are; on colocated ranks of all units together."""

    unit: str
    stage: int
    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def largest(self) -> str:
        """Name of what takes most."""
        return max(("weights", "gradients", "optimizer", "activations"), key=lambda name: float(getattr(self, name)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judgement:
    """Figures of a candidate over the global batches that it was simulated on."""

    candidate: Candidate
    strategy: str
    """Name of the strategy that planned the batches."""
    steps_s: Floats
    """(b,) seconds of the step of each global batch."""
    parts: Mapping[str, float]
    """GPU-seconds of a mean step of all GPUs of the cluster, by key of PARTS."""
    ranks: tuple[RankMemory, ...]
    """The fullest GPU of every stage, in pipeline order."""
    memory_bytes: float
    """What a GPU may hold."""

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return float(self.steps_s.mean())

    @property
    def fullest(self) -> RankMemory:
        """The GPU that holds most."""
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def over_bytes(self) -> float:
        """By how much the fullest GPU exceeds its memory; 0 if all fit."""
        return max(0.0, self.fullest.total - self.memory_bytes)

    @property
    def fits(self) -> bool:
        """Whether every GPU keeps within its memory."""
        return self.over_bytes == 0

    @property
    def key(self) -> tuple[float, float]:
        """What candidates are ranked by: first the excess of memory, then seconds."""
        return self.over_bytes, self.step_s

    def share(self, part: str) -> float:
        """Return a part's share of the time of all GPUs of the cluster."""
        total = sum(self.parts.values())
        return self.parts[part] / total if total > 0 else 0.0


def merged(first: Judgement, second: Judgement) -> Judgement:
    """Return what is said of one candidate by the batches of both judgements, the first of which took the time apart."""
    steps_s = np.concatenate((first.steps_s, second.steps_s))
    return replace(
        first,
        steps_s=steps_s,
        parts={name: amount * float(steps_s.mean()) / first.step_s for name, amount in first.parts.items()},
        ranks=tuple(
            replace(one, activations=max(one.activations, other.activations))
            for one, other in zip(first.ranks, second.ranks, strict=True)
        ),
    )


def seconds_beside(judgement: Judgement, reference: Judgement) -> float:
    """Return the seconds of a step as they compare with those of a candidate that was judged on as many batches or more."""
    common = judgement.steps_s.size
    return judgement.step_s * reference.step_s / float(reference.steps_s[:common].mean())


def why_it_loses(loser: Judgement, winner: Judgement) -> str:
    """Return in words what a candidate spends most more of than the winner, whose share stands behind it."""
    if not loser.fits:
        rank = loser.fullest
        return (
            f"takes {loser.over_bytes / GIB:.3g} GiB more than a GPU has, {getattr(rank, rank.largest) / GIB:.3g} GiB of "
            f"{rank.unit} are {'state of the optimizer' if rank.largest == 'optimizer' else rank.largest}"
        )
    part = max(_LOSES, key=lambda name: loser.parts[name] - winner.parts[name])
    share, best = f"{loser.share(part):.0%}", f"{winner.share(part):.0%}"
    if share == best:
        longer = seconds_beside(loser, winner) / winner.step_s - 1.0
        return f"takes {longer:.1%} longer, with no part that stands out"
    return f"{_LOSES[part].format(share)} (the best: {best})"


def in_words(candidate: Candidate) -> str:
    """Return the placement in one line, like `vision 2 x 1 x 1, llm 2 x 1 x 3, 8 microbatches`: dp x tp x pp of each unit."""
    if candidate.placement == "colocated":
        grid = candidate.grids[LLM]
        return f"all units on {grid.dp} x {grid.tp} ranks, {candidate.microbatches} microbatches"
    if candidate.sharing is not None:
        guests, others = (
            ", ".join(f"{unit} {grid.dp} x {grid.tp} x {grid.pp}" for unit, grid in candidate.grids.items() if is_guest(unit))
            for is_guest in (candidate.guests.__contains__, lambda unit: unit not in candidate.guests)
        )
        where = "nested in" if candidate.placement == "nested" else "in front of"
        guests += f" in {candidate.pieces} pieces" * (candidate.pieces > 1)
        depth = "" if candidate.in_flight is None else f", {candidate.in_flight} in flight"
        return f"{guests} {where} {others}, {candidate.microbatches} microbatches{depth}"
    grids = ", ".join(f"{unit} {grid.dp} x {grid.tp} x {grid.pp}" for unit, grid in candidate.grids.items())
    return f"{grids}, {candidate.microbatches} microbatches"


def num_idle(candidate: Candidate, cluster: Cluster) -> int:
    """Return how many GPUs of the cluster the candidate leaves without work."""
    return cluster.num_gpus - candidate.gpus
