"""StepPlan: which samples each unit of each microbatch of each replica processes (design section 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
        last = [LLM, GENERATOR] if GENERATOR in self.stages else [LLM]
        if list(self.stages)[-len(last) :] != last:
            raise ValueError(
                f"units must stand in pipeline order, encoders and then {' and '.join(last)}, got {list(self.stages)}"
            )

    @property
    def encoders(self) -> tuple[str, ...]:
        """The units in front of the LLM. They do not wait for each other."""
        return tuple(unit for unit in self.stages if unit not in (LLM, GENERATOR))

    @property
    def feeds(self) -> dict[str, str]:
        """Unit -> the unit behind it, which takes its samples; the last one feeds none."""
        return dict.fromkeys(self.encoders, LLM) | ({LLM: GENERATOR} if GENERATOR in self.stages else {})

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
    """No plan of this batch on this topology is faster, whatever its order: see the simulator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The plan of one global batch: `replicas[r][k]` is microbatch k of replica r."""

    strategy: str
    seed: int
    topology: Topology
    replicas: Sequence[Sequence[Microbatch]]
    generation: int = 1
    predicted: Predicted | None = None
    chosen: str = ""
    """The strategy that made the plan, where `strategy` chose among several."""

    def sample_ids(self) -> list[int]:
        """All samples of the plan, sorted."""
        return sorted(i for replica in self.replicas for microbatch in replica for i in microbatch.sample_ids)

    def check(self) -> None:
        """Raise ValueError unless every unit has every sample once, and no sample reaches a unit before it left the former.

        What counts is the index of the microbatch: a sample may pass its units on different replicas.
        """
        places = {unit: self._places(unit) for unit in self.topology.stages}
        llm = places.pop(LLM)
        for unit, place in places.items():
            for sample_id in place.keys() ^ llm.keys():
                unit_with, unit_without = (unit, LLM) if sample_id in place else (LLM, unit)
                raise ValueError(f"sample {sample_id} is in unit {unit_with!r} but not in {unit_without!r}")
            for sample_id, index in place.items():
                of_llm = llm[sample_id]
                if index < of_llm if unit == GENERATOR else index > of_llm:
                    raise ValueError(
                        f"sample {sample_id}: unit {unit!r} in microbatch {index} is out of order with {LLM!r} in {of_llm}"
                    )

    def _places(self, unit: str) -> dict[int, int]:
        """Index of the microbatch of every sample in a unit."""
        place: dict[int, int] = {}
        for replica in self.replicas:
            for index, microbatch in enumerate(replica):
                for sample_id in microbatch.units.get(unit, ()):
                    if sample_id in place:
                        raise ValueError(f"sample {sample_id} stands twice in unit {unit!r}")
                    place[sample_id] = index
        return place

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
        if self.chosen:
            document["chosen"] = self.chosen
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
            chosen=document.get("chosen", ""),
        )
