"""The section of a job spec that says for which pipelines its global batches are planned."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from headrace import limits
from headrace.errors import SpecError
from headrace.plan import GENERATOR, LLM, Topology
from headrace.user_document import SpecSection, parse_json


class TopologySpec(SpecSection):
    """The pipelines to plan for: data-parallel replicas, microbatches per replica, and pipeline stages per unit."""

    replicas: Annotated[int, Field(ge=1, le=limits.MAX_REPLICAS)] = 1
    """Number of data-parallel replicas (pipelines) of the LLM; ranks that have all units are a replica each."""
    microbatches: Annotated[int, Field(ge=1, le=limits.MAX_MICROBATCHES)] = 4
    """Number of microbatches of each replica in a step."""
    stages: dict[str, Annotated[int, Field(ge=1, le=limits.MAX_STAGES, strict=True)]] = Field(
        default_factory=lambda: {"encoder": 1, LLM: 3}
    )
    """Number of pipeline stages of each unit: of `encoder` (vision and audio together) or of `vision`, `audio` or both, of `llm`,
    and of `generator` if the job's model has one."""
    speeds: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    """Relative speed of each replica. If they differ, replicas get work in proportion, whatever the strategy. None: all equal."""

    @field_validator("stages")
    @classmethod
    def _known_units(cls, stages: dict[str, int]) -> dict[str, int]:
        encoders = set(stages) - {LLM, GENERATOR}
        if LLM not in stages or encoders not in ({"encoder"}, {"vision"}, {"audio"}, {"vision", "audio"}):
            raise ValueError(
                f"must name {LLM!r} and either 'encoder' or one or both of 'vision' and 'audio', and besides at most "
                f"{GENERATOR!r}, got {sorted(stages)}"
            )
        return {unit: stages[unit] for unit in ("encoder", "vision", "audio", LLM, GENERATOR) if unit in stages}

    @model_validator(mode="after")
    def _a_speed_each(self) -> Self:
        if self.speeds is not None and len(self.speeds) != self.replicas:
            raise ValueError(f"speeds must be one for each of {self.replicas} replicas, got {len(self.speeds)}")
        return self

    @model_validator(mode="after")
    def _can_be_planned(self) -> Self:
        self.check_size(self.replicas)
        return self

    def check_size(self, replicas: int) -> None:
        """Raise ValueError if so many replicas of a unit are too many to be planned."""
        stages = sum(self.stages.values())
        slots = replicas * self.microbatches * stages
        if slots > limits.MAX_SLOTS:
            raise ValueError(
                f"{replicas} replicas x {self.microbatches} microbatches x {stages} stages are {slots}, and at most "
                f"{limits.MAX_SLOTS} are planned: lower one of them"
            )

    def changed(
        self,
        *,
        replicas: int | None = None,
        microbatches: int | None = None,
        stages: Mapping[str, int] | None = None,
        speeds: Sequence[float] | None = None,
    ) -> TopologySpec:
        """Return a copy with the arguments that are not None in place of the present values. A new number of replicas drops the
        present speeds. Raises SpecError if the result is not valid."""
        fields = self.model_dump()
        if replicas not in (None, self.replicas):
            fields["speeds"] = None
        given = {"replicas": replicas, "microbatches": microbatches, "stages": stages, "speeds": speeds}
        return load_topology_json(json.dumps(fields | {name: value for name, value in given.items() if value is not None}))

    def topology(self) -> Topology:
        """Return the planner's form of this topology, without its speeds."""
        return Topology(replicas=self.replicas, microbatches=self.microbatches, stages=dict(self.stages))


def load_topology_json(text: str) -> TopologySpec:
    """Return the validated topology in JSON text. Raises SpecError if it is not valid."""
    try:
        return parse_json(TopologySpec, text, "topology")
    except SpecError as err:
        raise SpecError(f"topology: {err}") from err
