"""The plan of a step: which samples each unit processes in each microbatch of each replica (design section 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Every unit but these two is an encoder. A sample passes its encoders, the LLM and then the generator.
LLM = "llm"
GENERATOR = "generator"

CROSS_REPLICA_STRATEGIES = ("orchmllm",)
"""Strategies that balance each unit by itself, so that samples change their replica between units."""
FSDP_STRATEGIES = ("auto", "orchmllm", "random", "llm-only")
"""Strategies for FSDP ranks: each has a sample in one microbatch in all units. What others plan is in the order of a pipeline."""
BASELINE_STRATEGIES = ("llm-only",)
"""Strategies that are there to be compared with: a job may name them, and `auto` does not consider them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The shape of a pipeline-parallel job: data-parallel replicas, microbatches per replica, and stages of each unit.

    `stages` lists the units in pipeline order. Raises ValueError for a count below 1, no LLM, or units out of order.
    """

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
        """The encoder units, which all feed the LLM and do not wait for each other."""
        return tuple(unit for unit in self.stages if unit not in (LLM, GENERATOR))

    @property
    def feeds(self) -> dict[str, str]:
        """The unit that each unit passes its samples on to, by unit. The last unit has no entry."""
        return dict.fromkeys(self.encoders, LLM) | ({LLM: GENERATOR} if GENERATOR in self.stages else {})

    @property
    def num_stages(self) -> int:
        """Pipeline stages of one replica, over all units."""
        return sum(self.stages.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """One microbatch of one replica: the ids of the samples that each unit processes in it, in processing order."""

    units: dict[str, tuple[int, ...]]

    @property
    def sample_ids(self) -> tuple[int, ...]:
        """Ids of the samples in the LLM unit, whose loss this microbatch computes."""
        return self.units[LLM]


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The step time that the simulator predicts for a plan, and how much of it is idle."""

    iteration_s: float
    bubble: float
    """Share of the time of all stages in which they are idle (pipeline bubbles)."""
    lower_bound_s: float
    """Lower bound, in seconds, on the step time of any plan of this batch on this topology: see the simulator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The plan of one global batch: `replicas[r][k]` is microbatch k of replica r.

    Replicas that are unequal pipelines may have different numbers of microbatches; `topology.microbatches` is then the largest.
    """

    strategy: str
    seed: int
    topology: Topology
    replicas: Sequence[Sequence[Microbatch]]
    generation: int = 1
    predicted: Predicted | None = None
    chosen: str = ""
    """The strategy that made the plan if `strategy` (such as "auto") chose among several; otherwise empty."""
    in_flight: int | None = None
    """Most microbatches that a stage holds at a time under schedule 'eager': as many as the plan was simulated with.

    None means as many as the trainers' topology says.
    """
    unit_replicas: Mapping[str, Sequence[Sequence[tuple[int, ...]]]] = field(default_factory=dict)
    """The units that have another number of replicas than `topology.replicas`: `unit_replicas[unit][r][k]` are the samples that
    replica r of the unit processes in microbatch k, in processing order. Their entries in `replicas` say at the same index which
    of the LLM's replicas these samples are for."""
    forward_s: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Seconds of the forward through a whole unit, by unit and sample: what ranks go by that several units share.
    Empty where none do. It is no part of `to_json`."""
    degrees: Mapping[int, int] = field(default_factory=dict)
    """How many of the LLM's replicas share the sequence of a sample (context parallelism), by sample: the one that has it in
    `replicas`, and those that follow. Samples that are not named are on one."""

    def sharers(self, sample: int, replica: int) -> range:
        """Return the replicas of the LLM that share a sample. replica: the one that has it in `replicas`."""
        return range(replica, replica + self.degrees.get(sample, 1))

    def sample_ids(self) -> list[int]:
        """Return the ids of all samples of the plan, sorted."""
        return sorted(i for replica in self.replicas for microbatch in replica for i in microbatch.sample_ids)

    def check(self) -> None:
        """Raise ValueError unless every unit has every sample exactly once, and no sample reaches a unit before it has left the
        one in front. Only microbatch indices are compared: a sample may pass its units on different replicas.
        """
        places = {unit: self._places(unit) for unit in self.topology.stages}
        for unit in self.unit_replicas:
            self._check_dealt(unit, places)
        self._check_degrees()
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
        """Return the microbatch index of every sample in a unit, by sample id. Raises ValueError for one that is there twice."""
        place: dict[int, int] = {}
        for replica in self.replicas:
            for index, microbatch in enumerate(replica):
                for sample_id in microbatch.units.get(unit, ()):
                    if sample_id in place:
                        raise ValueError(f"sample {sample_id} stands twice in unit {unit!r}")
                    place[sample_id] = index
        return place

    def _check_degrees(self) -> None:
        """Raise ValueError where samples are shared by fewer than two replicas, or by some that are not there."""
        if not self.degrees:
            return
        shared = {
            sample: self.sharers(sample, r)
            for r, replica in enumerate(self.replicas)
            for microbatch in replica
            for sample in microbatch.sample_ids
            if sample in self.degrees
        }
        for sample, degree in self.degrees.items():
            if degree < 2 or sample not in shared or shared[sample].stop > len(self.replicas):
                raise ValueError(
                    f"sample {sample} is shared by {degree} replicas of {LLM!r}: it needs two or more, from the one that has it "
                    f"to the last of {len(self.replicas)}"
                )

    def _check_dealt(self, unit: str, places: Mapping[str, Mapping[int, int]]) -> None:
        """Raise ValueError unless the own replicas of a unit have each of its samples once, at the planned microbatch index."""
        if unit not in places or unit == LLM:
            raise ValueError(f"unit_replicas names {unit!r}, which is no unit of {', '.join(places)} but {LLM!r}")
        dealt: dict[int, int] = {}
        for replica in self.unit_replicas[unit]:
            if len(replica) != self.topology.microbatches:
                raise ValueError(
                    f"a replica of unit {unit!r} has {len(replica)} microbatches, and the plan {self.topology.microbatches}"
                )
            for index, samples in enumerate(replica):
                for sample_id in samples:
                    if sample_id in dealt:
                        raise ValueError(f"sample {sample_id} stands twice in the replicas of unit {unit!r}")
                    dealt[sample_id] = index
        if dealt != places[unit]:
            wrong = min(i for i in dealt.keys() | places[unit].keys() if dealt.get(i) != places[unit].get(i))
            raise ValueError(
                f"sample {wrong}: the replicas of unit {unit!r} have it in microbatch {dealt.get(wrong)}, "
                f"and the plan in {places[unit].get(wrong)}"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the public, stable JSON form of the plan, as plain data."""
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
        if self.in_flight is not None:
            document["in_flight"] = self.in_flight
        if self.unit_replicas:
            document["unit_replicas"] = {
                unit: [[list(ids) for ids in replica] for replica in replicas] for unit, replicas in self.unit_replicas.items()
            }
        if self.degrees:
            document["degrees"] = {str(sample): degree for sample, degree in self.degrees.items()}
        if self.predicted is not None:
            document["predicted"] = {
                "iteration_s": self.predicted.iteration_s,
                "bubble": self.predicted.bubble,
                "lower_bound_s": self.predicted.lower_bound_s,
            }
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> StepPlan:
        """Return the plan in a document of `to_json`."""
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
            in_flight=document.get("in_flight"),
            unit_replicas={
                unit: tuple(tuple(map(tuple, replica)) for replica in replicas)
                for unit, replicas in document.get("unit_replicas", {}).items()
            },
            degrees={int(sample): degree for sample, degree in document.get("degrees", {}).items()},
        )
