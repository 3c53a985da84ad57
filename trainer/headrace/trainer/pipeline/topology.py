"""The topology of a disaggregated pipeline: every unit has its own replicas, stages and slices.

This is pure arithmetic on ranks, without processes or tensors. Which layers a stage has is decided by
`headrace.trainer.pipeline.layer_partition`, and which places sum what together by `place_groups`.

The slices of a stage have the same samples: tensor-parallel ones have parts of its layers (`tp`), context-parallel ones parts of
the samples' sequences (`cp`).

Ranks are numbered unit by unit in pipeline order, within a unit replica by replica, then stage by stage, then slice by
slice. With vision of 2 replicas and an llm of 2 stages x 2 slices, ranks 0 and 1 are the replicas of vision, 2 and 3 the
slices of the llm's first stage, 4 and 5 those of its last. So the slices of a stage, which communicate most, are neighbours.

A unit that is `on: llm` has no ranks of its own: its places lie on the LLM's ranks, in the same order. With vision of 4 replicas
on that llm, rank 1 has the second replica of vision and the second slice of the llm's first stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from headrace.errors import UserError
from headrace.execution_spec import NESTED, ExecutionSpec, SharingOrder, UnitExecution, check_context, check_sharing, check_units
from headrace.model_shape import ModelShape, TransformerShape
from headrace.plan import GENERATOR, LLM
from headrace.schedule import build
from headrace.spec import JobSpec, parse, read_yaml
from headrace.trainer.models.adapted_units import HuggingFaceUnits
from headrace.trainer.optimizer_spec import OptimizerSpec
from headrace.trainer.pipeline.slice_width import check_width
from headrace.user_document import naming

ENCODER = "encoder"
"""Name of the unit that holds all encoders, in a topology in which they are not units of their own."""

_OF_PIPELINES = ("schedule", "chunks", "in_flight", "sharing")  # what jobs, too, say of pipelines as a whole


@dataclass(frozen=True, slots=True)
class Place:
    """A place of a process in a pipeline: a slice of a stage of a replica of a unit. A process that units share has a place in
    each of them."""

    unit: str
    replica: int
    stage: int
    slice: int

    def __str__(self) -> str:
        return f"{self.unit} replica {self.replica}, stage {self.stage}, slice {self.slice}"


class UnitTopology(UnitExecution):
    """The parallelism of one unit, which of its weights are frozen, and how its layers keep their activations."""

    dp: Annotated[int, Field(ge=1)] = 1
    """Number of data-parallel replicas."""
    pp: Annotated[int, Field(ge=1)] = 1
    """Number of pipeline stages."""

    @property
    def num_places(self) -> int:
        return self.dp * self.num_slices * self.pp

    def tensor_slice(self, place: Place) -> int:
        """Return which slice of the layers a place has: slices with the same parts of a sequence are neighbours."""
        return place.slice % self.tp

    def __str__(self) -> str:
        shared = f" with cp {self.cp}" if self.cp != 1 else ""
        return f"{self.dp} x {self.tp} x {self.pp}{shared}" + (f" on {self.on}" if self.on else "")


class PipelineTopology(BaseModel):
    """The topology of a whole pipeline: all units in pipeline order, and the schedule that their stages follow."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    schedule: str = "1f1b"
    """Name of the pipeline schedule, one of `headrace.schedule.SCHEDULES`."""
    chunks: int = 1
    """Number of parts of a unit on each of its stages; more than 1 only for 'interleaved'."""
    in_flight: int | None = None
    """Most microbatches that a stage may hold under the 'eager' schedule, for plans that do not name it. None: no limit."""
    sharing: SharingOrder = NESTED
    """In which order a rank that several units share takes their actions."""
    units: dict[str, UnitTopology]
    """The units by name, sorted into pipeline order; encoders keep the order in which they are given."""
    model: HuggingFaceUnits = HuggingFaceUnits()
    """Units that are models of Hugging Face's transformers. All other units are those of the compact model of the job's size."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """Settings of the optimizer. They must give a learning rate if `model` has pretrained weights."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability with which each value that attention and MLP add in the LLM's layers is dropped; drawn by sample."""

    @field_validator("units")
    @classmethod
    def _in_pipeline_order(cls, units: dict[str, UnitTopology]) -> dict[str, UnitTopology]:
        if LLM not in units:
            raise ValueError(f"must name {LLM!r}, got {', '.join(units) or 'none'}: add it")
        return dict(sorted(units.items(), key=lambda item: (item[0] == GENERATOR, item[0] == LLM)))

    @model_validator(mode="after")
    def _can_be_scheduled(self) -> Self:
        check_context(self.units, self.units)
        check_units(self.units, self.stages, self.chunks, self.schedule)
        check_sharing(self.units, self.sharing, {unit: size.num_places for unit, size in self.units.items()})
        build(self.schedule, self.stages, (), chunks=self.chunks, in_flight=self.in_flight)
        return self

    @classmethod
    def of_job(cls, spec: JobSpec) -> Self:
        """Return the topology that a job plans for, with the compact model's units; `execution` is its inverse."""
        said, replicas = spec.execution, spec.topology.replicas
        units = {unit: (said.units.get(unit, UnitExecution()), stages) for unit, stages in spec.topology.stages.items()}
        return cls(
            schedule=said.schedule,
            chunks=said.chunks,
            in_flight=said.in_flight,
            sharing=said.sharing,
            units={
                unit: UnitTopology(**of_unit.model_dump(exclude={"dp"}), dp=of_unit.dp or replicas, pp=stages)
                for unit, (of_unit, stages) in units.items()
            },
        )

    def frozen(self) -> Self:
        """Return the same topology with nothing that learns, whose steps are forward only, as in an evaluation."""
        frozen = {"frozen": True, "frozen_projector": True}
        return self.model_copy(update={"units": {unit: size.model_copy(update=frozen) for unit, size in self.units.items()}})

    @property
    def execution(self) -> ExecutionSpec:
        """What a job's spec says of trainers with this topology, as far as the topology knows it."""
        units = {
            unit: UnitExecution(**size.model_dump(exclude={"dp", "pp"}), dp=None if size.dp == self.units[LLM].dp else size.dp)
            for unit, size in self.units.items()
        }
        return ExecutionSpec(
            trainer="pipeline",
            schedule=self.schedule,
            chunks=self.chunks,
            in_flight=self.in_flight,
            sharing=self.sharing,
            units={unit: execution for unit, execution in units.items() if execution != UnitExecution()},
        )

    def planned_for(self, spec: JobSpec, replicas: int) -> JobSpec:
        """Return the spec of a job that is planned for trainers of this topology; memory, links and costs stay as it says them.

        replicas: of the LLM. Raises SpecError where the job's model does not fit.
        """
        ours, exchange_s = self.execution, spec.execution.of_units("exchange_s")
        units = {
            unit: size.model_copy(update={"exchange_s": exchange_s[unit]}) if unit in exchange_s else size
            for unit in self.units
            if (size := ours.units.get(unit, UnitExecution())) != UnitExecution() or unit in exchange_s
        }
        said = {name: getattr(ours, name) for name in ("trainer", *_OF_PIPELINES)} | {"units": units}
        topology = spec.topology.changed(replicas=replicas, stages=self.stages)
        return spec.planned_for(topology, spec.execution.model_copy(update=said))

    @property
    def world_size(self) -> int:
        """Number of processes of all units together."""
        return sum(size.num_places for size in self.units.values() if size.on is None)

    @property
    def num_places(self) -> int:
        """Number of places of all units together: more than processes where units share them."""
        return sum(size.num_places for size in self.units.values())

    @property
    def shares_ranks(self) -> bool:
        """Whether any process has places in several units."""
        return self.num_places > self.world_size

    @property
    def shards_weights(self) -> bool:
        """Whether the replicas of any unit gather weights from each other during a step."""
        return any(size.shard_weights and size.dp > 1 for size in self.units.values())

    @property
    def replicas(self) -> dict[str, int]:
        """Number of replicas of each unit."""
        return {unit: size.dp for unit, size in self.units.items()}

    @property
    def stages(self) -> dict[str, int]:
        """Number of stages of each unit, as `headrace.schedule` takes it."""
        return {unit: size.pp for unit, size in self.units.items()}

    def num_parts(self, unit: str) -> int:
        """Return the number of parts that the layers of a unit are cut into: part c * pp + s is chunk c of stage s."""
        return self.units[unit].pp * self.chunks_of(unit)

    def chunks_of(self, unit: str) -> int:
        """Return the number of parts that each stage of a unit has: the schedule's chunks, or the unit's pieces."""
        return self.chunks * self.units[unit].pieces

    def ranks(self, unit: str) -> range:
        """Return the ranks of one unit, which are consecutive."""
        own = [other for other, size in self.units.items() if size.on is None]
        first = sum(self.units[other].num_places for other in own[: own.index(self.units[unit].on or unit)])
        return range(first, first + self.units[unit].num_places)

    def places(self, rank: int) -> tuple[Place, ...]:
        """Return the places of a rank in pipeline order. Raises ValueError for a rank outside of the topology."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be from 0 to {self.world_size - 1}, got {rank}")
        return tuple(self._place(unit, rank - self.ranks(unit).start) for unit in self.units if rank in self.ranks(unit))

    def place(self, rank: int) -> Place:
        """Return the only place of a rank. Raises ValueError for a rank outside of the topology, or that units share."""
        place, *others = self.places(rank)
        if others:
            raise ValueError(f"rank {rank} has several places: {place}, {', '.join(map(str, others))}")
        return place

    def _place(self, unit: str, index: int) -> Place:
        before, number = divmod(index, self.units[unit].num_slices)
        replica, stage = divmod(before, self.units[unit].pp)
        return Place(unit, replica, stage, number)

    def rank(self, place: Place) -> int:
        """Return the rank of a place. Raises ValueError for a place outside of the topology."""
        index = self._index(place)
        return self.ranks(place.unit)[index]

    def number(self, place: Place) -> int:
        """Return the number of a place, counted unit by unit: its rank where no units share any.

        Raises ValueError for a place outside of the topology.
        """
        index = self._index(place)
        units = list(self.units)
        return index + sum(self.units[unit].num_places for unit in units[: units.index(place.unit)])

    def _index(self, place: Place) -> int:
        size = self.units.get(place.unit)
        if size is None or not (
            0 <= place.replica < size.dp and 0 <= place.stage < size.pp and 0 <= place.slice < size.num_slices
        ):
            raise ValueError(f"there is no {place} in units of dp x tp x pp {self._sizes()}")
        return (place.replica * size.pp + place.stage) * size.num_slices + place.slice

    @property
    def rank_of(self) -> list[int]:
        """The rank of every place, by its number."""
        return [rank for unit in self.units for rank in self.ranks(unit)]

    def check_execution(self, planned: ExecutionSpec, stages: Mapping[str, int]) -> None:
        """Raise UserError where the job plans for trainers that run something else. A job that says nothing is not compared.

        stages: number of stages that the job plans for, by unit.
        """
        for name, ours, theirs in self.differences(planned, stages):
            raise UserError(
                f"the job plans for {name} {theirs}, but the topology of the trainers has {ours}: "
                "change one of them; `headrace job topology JOB --file FILE` has the job planned for that of FILE"
            )

    def differences(self, planned: ExecutionSpec, stages: Mapping[str, int]) -> Iterator[tuple[str, str, str]]:
        """Yield what the job plans for and these trainers do not run: its name, what they run, and what is planned, in words.

        There are none where the job says nothing. stages: number of stages that the job plans for, by unit.
        """
        if planned.says_nothing:
            return
        for name, ours, theirs in (*self._compared(planned), ("stages", self.stages, dict(stages))):
            if ours != theirs:
                yield name, _in_words(ours), _in_words(theirs)

    def _compared(self, planned: ExecutionSpec) -> Iterator[tuple[str, object, object]]:
        yield "trainer", self.execution.trainer, planned.trainer or self.execution.trainer
        for name in _OF_PIPELINES:
            yield name, getattr(self.execution, name), getattr(planned, name)
        options = (
            "on",
            "pieces",
            "tp",
            "cp",
            "tp_overlap",
            "frozen",
            "frozen_layers",
            "frozen_projector",
            "checkpointing",
            "fp32_residual_connection",
            "shard_weights",
            "compile",
        )
        for option in options:
            yield f"{option} units", self.execution.of_units(option), planned.of_units(option)
        llm = self.units[LLM].dp
        yield "units with a dp of their own", self.execution.unit_replicas(llm), planned.unit_replicas(llm)

    def check(self, world_size: int, shape: ModelShape) -> None:
        """Raise UserError unless the model can be cut into this topology and it needs `world_size` processes.

        shape: the shape of the job's model.
        """
        stacks = shape.units
        have = [unit for unit, stack in stacks.items() if stack.layers]
        for unit in self.units:
            if unit not in stacks or not stacks[unit].layers:
                raise UserError(f"the model has no unit {unit!r}, only {', '.join(have)}: take {unit!r} out of units")
            self._check_unit(unit, stacks[unit])
        if GENERATOR in stacks and GENERATOR not in self.units:
            raise UserError(f"the model has a {GENERATOR}, but units does not: name it there, or take a model without one")
        if ENCODER in self.units:
            self._check_joint_encoder()
        self.check_world(world_size)

    def check_world(self, world_size: int) -> None:
        """Raise UserError unless the topology needs `world_size` processes."""
        if world_size != self.world_size:
            raise UserError(
                f"the topology needs {self.world_size} processes ({self._sizes()}), but there are {world_size}: start "
                f"{self.world_size} processes (torchrun's nodes x --nproc-per-node), or change a unit's dp, tp or pp (they stand "
                "in this order)" + (f", or the cp of {LLM!r}" if self.units[LLM].cp != 1 else "")
            )

    def _check_unit(self, unit: str, shape: TransformerShape) -> None:
        size, parts = self.units[unit], self.num_parts(unit)
        if shape.layers < parts:
            cut = {n: by for n, by in (("pp", size.pp), ("chunks", self.chunks), ("pieces", size.pieces)) if by > 1}
            raise UserError(
                f"unit {unit!r} has {shape.layers} layers, too few for {' x '.join(f'{n} {by}' for n, by in cut.items())} = "
                f"{parts} parts of at least one layer: lower its {' or '.join(cut)}"
            )
        if size.cuts and size.cuts[-1] >= shape.layers:
            raise UserError(
                f"unit {unit!r} has layers 0 to {shape.layers - 1}, but a part that begins at {size.cuts[-1]}: lower its cuts"
            )
        if size.frozen_layers >= shape.layers:
            raise UserError(
                f"unit {unit!r} has {shape.layers} layers, but frozen_layers is {size.frozen_layers}: lower it, or set frozen"
            )
        check_width(unit, shape, size.tp)

    def _check_joint_encoder(self) -> None:
        size = self.units[ENCODER]
        if {"vision", "audio"} & set(self.units):
            raise UserError(f"unit {ENCODER!r} is vision and audio together: name either it or the two")
        of_layers = size.checkpointing or size.frozen_layers or not size.fp32_residual_connection or size.compile
        if self.num_parts(ENCODER) > 1 or size.tp > 1 or of_layers:
            raise UserError(
                f"unit {ENCODER!r} holds several encoders, whole: for pp, tp, chunks, checkpointing, frozen_layers, "
                "compile or fp32_residual_connection, name 'vision' and 'audio' in its place"
            )

    def _sizes(self) -> str:
        return ", ".join(f"{unit} {size}" for unit, size in self.units.items())


def load_topology_yaml(path: Path, job: JobSpec | None = None) -> PipelineTopology:
    """Load a topology from a YAML file, and its pipeline from `job` where the file names no units. Raises SpecError."""
    document = read_yaml(path, "topology")
    with naming(path):
        if job is not None and isinstance(document, dict) and "units" not in document:
            document = {**PipelineTopology.of_job(job).model_dump(), **document}
        return parse(PipelineTopology, document, "topology")


def _in_words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(unit if setting is True else f"{unit} ({setting})" for unit, setting in sorted(value.items())) or "none"
    return str(value)
