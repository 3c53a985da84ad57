"""The specification of a recoverable job's nodes, as users write it in YAML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.errors import UserError
from headrace.execution_spec import ExecutionSpec
from headrace.limits import MAX_GPUS_PER_NODE
from headrace.model_shape import ModelShape, TransformerShape
from headrace.plan import LLM
from headrace.spec import AudioSpec, ImageSpec, parse, read_yaml
from headrace.trainer.models.adapted_units import HuggingFaceUnits
from headrace.trainer.models.audio_encoder import STRIDE
from headrace.trainer.optimizer_spec import OptimizerSpec
from headrace.trainer.pipeline.layer_partition import layer_costs
from headrace.trainer.pipeline.topology import ENCODER, PipelineTopology, UnitTopology
from headrace.user_document import naming
from headrace.v1 import membership_pb2

Ints = npt.NDArray[np.int64]

_WEIGHT_BYTES = 4
_STATE_BYTES = 16
"""Bytes per trainable parameter: weight, gradient and AdamW's two moments in float32."""


class RecoverableUnit(BaseModel):
    """What of a unit is trained. Its stages and the number of pipelines follow from the nodes."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    frozen: bool = False
    """Whether the unit's weights are frozen."""
    frozen_projector: bool = False
    """Whether the projector from the unit to the next one is frozen."""
    checkpointing: bool = False
    """Whether the unit's layers use activation checkpointing: they keep only their inputs, and run their forward again in the
    backward."""


class RecoverySpec(BaseModel):
    """Specification of a recoverable job: its nodes, its units and the failures to survive.

    A node is `gpus_per_node` processes, which are lost together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    nodes: int = Field(ge=1)
    """Number of nodes at which training begins."""
    gpus_per_node: int = Field(default=1, ge=1, le=MAX_GPUS_PER_NODE)
    """Number of processes of a node. Each has a GPU, or a share of the CPU, and one stage of a pipeline to itself."""
    max_failures: int = Field(default=1, ge=0)
    """Number of nodes that may be lost at the same time: every layer is on at least one node more than that."""
    memory_gib: float | None = Field(default=None, gt=0)
    """Memory of a process for weights, gradients and optimizer state, in GiB. None: pipelines are planned without a limit."""
    schedule: str = "1f1b"
    """Schedule of every pipeline: '1f1b', 'gpipe', 'eager' or 'zero-bubble'."""
    on_loss: Literal["auto", "rebuild", "reroute"] = "auto"
    """What comes first when a node is lost in the middle of a step: 'rebuild' forms pipelines of all remaining nodes, which
    repeat the step; 'reroute' has the complete pipelines do the microbatches of the others, and rebuilds at the step's end;
    'auto' takes whichever is done earlier."""
    units: dict[str, RecoverableUnit]
    """The units by name, which must include 'llm'."""
    model: HuggingFaceUnits = HuggingFaceUnits()
    """Units that are models of Hugging Face's transformers, at paths that every node has."""
    optimizer: OptimizerSpec = OptimizerSpec()
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability with which each value that attention and MLP add in the LLM's layers is dropped; drawn by sample."""

    @model_validator(mode="after")
    def _makes_pipelines(self) -> RecoverySpec:
        self.pipeline(dict.fromkeys(self.units, (0, 1)))
        return self

    def check_execution(self, planned: ExecutionSpec) -> None:
        """Raise UserError where the job plans for pipelines that run something else. A job that says nothing is not compared.

        How many microbatches are in flight is not compared, as the nodes follow what their plans say, nor are the stages, which
        follow from the nodes.
        """
        pipeline = self.pipeline(dict.fromkeys(self.units, (0, 1)))
        for name, ours, theirs in pipeline.differences(planned, pipeline.stages):
            if name != "in_flight":
                raise UserError(
                    f"the job's execution plans for {name} {theirs}, but the nodes' spec has {ours}: change one of them"
                )

    def pipeline(self, bounds: dict[str, tuple[int, ...]]) -> PipelineTopology:
        """Return the topology of one pipeline. bounds: layer bounds of each unit's stages, (0, ..., number of layers)."""
        units = {
            name: UnitTopology(pp=len(bounds[name]) - 1, cuts=bounds[name][1:-1], **unit.model_dump())
            for name, unit in self.units.items()
        }
        return PipelineTopology(schedule=self.schedule, units=units)


def load_recovery_yaml(path: Path) -> RecoverySpec:
    """Load the spec from a YAML file. Raises SpecError."""
    document = read_yaml(path, "nodes")
    with naming(path):
        return parse(RecoverySpec, document, "nodes")


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
    """Return the message from which the reorder service plans pipelines, and which it compares between nodes.

    Raises UserError if a node has more processes than the model has layers, of which each process needs one.

    The `seconds` of a layer are relative: the matrix elements that a row is multiplied with in forward and backward, times the
    rows that the unit has per LLM token if all tokens are of images or recordings.
    """
    topology = spec.pipeline(dict.fromkeys(spec.units, (0, 1)))
    costs = layer_costs(topology, shape, vocab_size=vocab_size, image=image, audio=audio)
    rows = {ENCODER: image.merge**2, "vision": image.merge**2, "audio": audio.frames_per_token // STRIDE}
    embedded = vocab_size if spec.model.llm is None else shape.llm.vocab
    profile = membership_pb2.ModelProfile(memory_bytes=np.iinfo(np.int64).max // 2)
    if spec.memory_gib is not None:
        profile.memory_bytes = int(spec.memory_gib * 2**30)
    for unit in topology.units:
        seconds = rows.get(unit, 1) * np.sum(costs[unit], axis=0)
        num_bytes = _layer_bytes(shape.units[unit], embedded if unit == LLM else 0, frozen=spec.units[unit].frozen)
        if unit == ENCODER:  # it cannot be cut
            seconds, num_bytes = seconds.sum(keepdims=True), num_bytes.sum(keepdims=True)
        profile.units.add(unit=unit, num_layers=len(seconds))
        profile.seconds.extend(seconds.tolist())
        profile.layer_bytes.extend(num_bytes.tolist())
    if spec.gpus_per_node > (num_layers := sum(unit.num_layers for unit in profile.units)):
        raise UserError(
            f"nodes of {spec.gpus_per_node} processes have a stage each, but the model has {num_layers} layers that can be one: "
            f"give gpus_per_node {num_layers} or less, as a stage is not shared by several processes (Oobleck shards it, by FSDP)"
        )
    return membership_pb2.NodesSpec(
        gpus_per_node=spec.gpus_per_node,
        num_nodes=spec.nodes,
        max_failures=spec.max_failures,
        num_microbatches=num_microbatches,
        profile=profile,
        on_loss=spec.on_loss,
        training=json.dumps({"precision": precision, **_training(spec)}),
    )


def _training(spec: RecoverySpec) -> dict[str, object]:
    """Return what all nodes must do alike."""
    document = spec.model_dump(mode="json", include={"schedule", "units", "optimizer"})
    return {**document, "dropout": spec.dropout} if spec.dropout else document


def _layer_bytes(stack: TransformerShape, vocab_size: int, *, frozen: bool) -> Ints:
    """Return the bytes of every layer's weights with gradients and optimizer state, or of the weights alone if frozen.

    The LLM's first layer includes the embedding, and its last one the head. vocab_size: 0 for other units.
    """
    num_weights = np.full(stack.layers, stack.layer_weights, np.int64)
    num_weights[[0, -1]] += vocab_size * stack.width
    return num_weights * (_WEIGHT_BYTES if frozen else _STATE_BYTES)
