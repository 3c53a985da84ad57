"""StepPlan: which samples each unit of each microbatch of each replica processes (design section 6)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Units in the order in which a sample passes them. A unit that is not listed here is an encoder.
LLM = "llm"
GENERATOR = "generator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Replicas (DP pipelines), microbatches per replica, and pipeline stages of each unit in pipeline order."""

    replicas: int
    microbatches: int
    stages: dict[str, int]

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.microbatches < 1:
            raise ValueError(f"replicas and microbatches must be at least 1, got {self.replicas} and {self.microbatches}")
        if LLM not in self.stages or min(self.stages.values()) < 1:
            raise ValueError(f"stages must give each unit, {LLM!r} among them, at least one stage, got {self.stages}")

    @property
    def num_stages(self) -> int:
        return sum(self.stages.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Sample ids per unit, in processing order."""

    units: dict[str, tuple[int, ...]]

    @property
    def sample_ids(self) -> tuple[int, ...]:
        """Samples whose loss this microbatch computes."""
        return self.units[LLM]


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What the simulator expects of a plan."""

    iteration_s: float
    bubble: float
    """Share of stage time in which the stages are idle."""
    lower_bound_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The plan of one global batch: `replicas[r][k]` is microbatch k of replica r."""

    strategy: str
    seed: int
    topology: Topology
    replicas: tuple[tuple[Microbatch, ...], ...]
    generation: int = 1
    predicted: Predicted | None = field(default=None)

    def sample_ids(self) -> list[int]:
        """All samples of the plan, sorted."""
        return sorted(i for replica in self.replicas for microbatch in replica for i in microbatch.sample_ids)

    def check(self) -> None:
        """Raise ValueError unless every unit has every sample once, and no sample's llm precedes its encoder."""
        everyone = self.sample_ids()
        if len(set(everyone)) != len(everyone):
            raise ValueError("a sample stands twice in the llm unit")
        for replica in self.replicas:
            place = {
                (unit, i): index
                for index, microbatch in enumerate(replica)
                for unit, ids in microbatch.units.items()
                for i in ids
            }
            for (unit, sample_id), index in place.items():
                llm = place.get((LLM, sample_id))
                if llm is None:
                    raise ValueError(f"sample {sample_id} is in unit {unit!r} of a replica that lacks it in {LLM!r}")
                if (unit == GENERATOR and index < llm) or (unit not in (LLM, GENERATOR) and index > llm):
                    raise ValueError(
                        f"sample {sample_id}: unit {unit!r} in microbatch {index} is out of order with {LLM!r} in {llm}"
                    )

    def to_json(self) -> dict[str, Any]:
        """The public, stable JSON form."""
        document: dict[str, Any] = {
            "strategy": self.strategy,
            "seed": self.seed,
            "generation": self.generation,
            "topology": {
                "replicas": self.topology.replicas,
                "microbatches": self.topology.microbatches,
                "stages": dict(self.topology.stages),
            },
            "replicas": [
                {"replica": r, "microbatches": [{unit: list(ids) for unit, ids in m.units.items()} for m in microbatches]}
                for r, microbatches in enumerate(self.replicas)
            ],
        }
        if self.predicted is not None:
            document["predicted"] = {
                "iteration_s": self.predicted.iteration_s,
                "bubble": self.predicted.bubble,
                "lower_bound_s": self.predicted.lower_bound_s,
            }
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> StepPlan:
        """The plan behind `to_json`'s document."""
        predicted = document.get("predicted")
        return cls(
            strategy=document["strategy"],
            seed=document["seed"],
            generation=document["generation"],
            topology=Topology(**document["topology"]),
            replicas=tuple(
                tuple(Microbatch(units={unit: tuple(ids) for unit, ids in m.items()}) for m in replica["microbatches"])
                for replica in document["replicas"]
            ),
            predicted=Predicted(**predicted) if predicted else None,
        )
