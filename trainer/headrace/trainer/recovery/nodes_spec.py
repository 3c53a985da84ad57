"""The nodes of a recoverable job, as its users write them down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.model_shape import ModelShape, TransformerShape
from headrace.plan import LLM
from headrace.spec import AudioSpec, ImageSpec, parse, read_yaml
from headrace.trainer.models.audio_encoder import STRIDE
from headrace.trainer.optimizer_spec import OptimizerSpec
from headrace.trainer.pipeline.layer_partition import layer_costs
from headrace.trainer.pipeline.topology import ENCODER, PipelineTopology, UnitTopology, unit_shapes
from headrace.v1 import membership_pb2

Ints = npt.NDArray[np.int64]

_WEIGHT_BYTES = 4
_STATE_BYTES = 16
"""Of a parameter that learns: weight, gradient and AdamW's two moments, float32."""


class RecoverableUnit(BaseModel):
    """What of a unit is trained. Its stages, and how many pipelines there are, follow from the nodes."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    frozen: bool = False
    """Whether the unit keeps its weights."""
    frozen_projector: bool = False
    """Whether the projector that leads from the unit to the next one keeps its weights."""
    checkpointing: bool = False
    """Whether its layers keep only their inputs, and run their forward again when the backward needs the rest."""


class RecoverySpec(BaseModel):
    """Nodes, units and the failures to survive. A node is one process with all of its GPU."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    nodes: int = Field(ge=1)
    """Training begins when so many are there."""
    max_failures: int = Field(default=1, ge=0)
    """Nodes that may be lost at the same time: every layer is on one node more than that."""
    memory_gib: float | None = Field(default=None, gt=0)
    """Of a node, for weights, gradients and the optimizer's state. None: whatever there is."""
    schedule: str = "1f1b"
    """Of every pipeline: '1f1b', 'gpipe', 'eager' or 'zero-bubble'."""
    on_loss: Literal["auto", "rebuild", "reroute"] = "auto"
    """What comes first when a node is lost in the middle of a step: 'rebuild' makes pipelines of all nodes that are left, which
    repeat it; 'reroute' has the pipelines that are whole do the other ones' microbatches, and rebuilds at the step's end; 'auto'
    takes what is done earlier."""
    units: dict[str, RecoverableUnit]
    """By name, 'llm' among them."""
    optimizer: OptimizerSpec = OptimizerSpec()

    @model_validator(mode="after")
    def _makes_pipelines(self) -> RecoverySpec:
        self.pipeline(dict.fromkeys(self.units, (0, 1)))
        return self

    def pipeline(self, bounds: dict[str, tuple[int, ...]]) -> PipelineTopology:
        """One pipeline as a topology. bounds: of each unit's stages, (0, ..., number of layers)."""
        units = {
            name: UnitTopology(pp=len(bounds[name]) - 1, cuts=bounds[name][1:-1], **unit.model_dump())
            for name, unit in self.units.items()
        }
        return PipelineTopology(schedule=self.schedule, units=units)


def load_recovery_yaml(path: Path) -> RecoverySpec:
    """The spec in a YAML file. Raises SpecError."""
    return parse(RecoverySpec, read_yaml(path, "nodes"), "nodes")


def nodes_message(
    spec: RecoverySpec,
    shape: ModelShape,
    *,
    num_microbatches: int,
    vocab_size: int,
    image: ImageSpec,
    audio: AudioSpec,
    precision: str = "fp32",
) -> membership_pb2.NodesSpec:
    """What the reorder service plans pipelines from, and what it compares between nodes.

    Seconds are relative: elements of the matrices that a row meets, forth and back, times the rows that a unit has for one
    token of the LLM where all of them are of images or recordings.
    """
    topology = spec.pipeline(dict.fromkeys(spec.units, (0, 1)))
    costs = layer_costs(topology, shape, vocab_size=vocab_size, image=image, audio=audio)
    rows = {ENCODER: image.merge**2, "vision": image.merge**2, "audio": audio.frames_per_token // STRIDE}
    profile = membership_pb2.ModelProfile(memory_bytes=np.iinfo(np.int64).max // 2)
    if spec.memory_gib is not None:
        profile.memory_bytes = int(spec.memory_gib * 2**30)
    for unit in topology.units:
        seconds = rows.get(unit, 1) * np.sum(costs[unit], axis=0)
        num_bytes = _layer_bytes(unit_shapes(shape)[unit], vocab_size if unit == LLM else 0, frozen=spec.units[unit].frozen)
        if unit == ENCODER:  # it cannot be cut
            seconds, num_bytes = seconds.sum(keepdims=True), num_bytes.sum(keepdims=True)
        profile.units.add(unit=unit, num_layers=len(seconds))
        profile.seconds.extend(seconds.tolist())
        profile.layer_bytes.extend(num_bytes.tolist())
    return membership_pb2.NodesSpec(
        num_nodes=spec.nodes,
        max_failures=spec.max_failures,
        num_microbatches=num_microbatches,
        profile=profile,
        on_loss=spec.on_loss,
        training=json.dumps({"precision": precision, **spec.model_dump(mode="json", include={"schedule", "units", "optimizer"})}),
    )


def _layer_bytes(stack: TransformerShape, vocab_size: int, *, frozen: bool) -> Ints:
    """Of every layer; the LLM's first one has the embedding, and its last one the head. vocab_size: 0 in other units."""
    num_weights = np.full(stack.layers, stack.layer_weights, np.int64)
    num_weights[[0, -1]] += vocab_size * stack.width
    return num_weights * (_WEIGHT_BYTES if frozen else _STATE_BYTES)
