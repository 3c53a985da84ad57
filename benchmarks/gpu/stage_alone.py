"""The LLM as a pipeline of one process on one device, with plans and batches made by hand: what most checks run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from headrace.model_shape import MODEL_SHAPES, ModelShape, TransformerShape
from headrace.plan import LLM, Microbatch, StepPlan, Topology
from headrace.sample import SCHEMA, UNIT_COLUMNS
from headrace.spec import AudioSpec, ImageSpec, parse
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.models.multimodal import MultimodalModel
from headrace.trainer.pipeline.layer_partition import bounds, with_cuts
from headrace.trainer.pipeline.pipeline_step import PipelineStep
from headrace.trainer.pipeline.place_step import PlaceStep
from headrace.trainer.pipeline.process_groups import ProcessGroups
from headrace.trainer.pipeline.routes import Portion, Routes
from headrace.trainer.pipeline.stage_building import build_stages
from headrace.trainer.pipeline.topology import PipelineTopology
from headrace.trainer.train_step import StepResult
from tests.verify.batches import packed

LEARNING_RATE = 1e-4


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Hold a process group of this process alone, with the backend of the device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAlone:
    """A whole LLM in one process, and a global batch for it, whose microbatches are on the device already."""

    step: PipelineStep
    """Of one place."""
    batch: Sequence[PackedMicrobatch]

    @property
    def place(self) -> PlaceStep:
        return self.step.places[0]

    @property
    def model(self) -> nn.Module:
        return nn.ModuleList(self.place.stages)

    @property
    def num_tokens(self) -> int:
        """Tokens of a step."""
        return sum(len(microbatch.input_ids) for microbatch in self.batch)

    @property
    def num_weights(self) -> int:
        """Elements of the matrices that every token is multiplied with: all but the embedding, which is looked up."""
        stages = [stage for stage in self.place.stages if stage.is_tied]
        named = [(name, p) for stage in self.place.stages for name, p in stage.model.named_parameters()]
        return sum(p.numel() for name, p in named if p.ndim == 2 and (stages or not name.endswith("embed.weight")))

    def run(self) -> StepResult:
        """Run one step: forward and backward of all microbatches, and the update."""
        return self._with_feed(lambda routes, feed: self.step.run(routes, [feed], LEARNING_RATE))

    def accumulate(self) -> StepResult:
        """Run forward and backward, and leave the gradients."""
        return self._with_feed(lambda routes, feed: self.step.accumulate(routes, [feed]))

    def _with_feed(self, run: Callable[[Routes, Any], StepResult]) -> StepResult:
        microbatches = [Microbatch(units={LLM: tuple(one.sample_ids.tolist())}) for one in self.batch]
        planned = Topology(replicas=1, microbatches=len(microbatches), stages={LLM: 1})
        plan = StepPlan(strategy="by hand", seed=0, topology=planned, replicas=[microbatches])
        by_samples = {one.units[LLM]: data for one, data in zip(microbatches, self.batch, strict=True)}

        def data_of(portion: Portion) -> PackedMicrobatch:
            return by_samples[portion.samples]

        routes = Routes(plan, {LLM: 1})
        return run(routes, self.place.prepare.feed(routes, data_of))


def stage_alone(
    shape: TransformerShape,
    lengths: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    device: torch.device,
    dtype: torch.dtype,
    **settings: Any,
) -> StageAlone:
    """Build an LLM on the device, and a batch for it on the host.

    lengths: of the samples of each microbatch, in tokens. settings: further arguments of `step_alone`.
    """
    step = step_alone(shape, vocab_size=vocab_size, device=device, dtype=dtype, **settings)
    return StageAlone(step=step, batch=text_batch(lengths, vocab_size))


def step_alone(
    shape: TransformerShape,
    *,
    vocab_size: int,
    device: torch.device,
    dtype: torch.dtype,
    schedule: Mapping[str, Any] | None = None,
    change: Callable[[nn.Module], None] | None = None,
    **of_unit: Any,
) -> PipelineStep:
    """Build the pipeline of one process that has an LLM of this shape. `process_group` must be held.

    schedule: what a topology says of it; None: 1f1b. change: called with the stages while they are on the CPU, where they are
    then built; None: they are built on the device. of_unit: settings of the unit in a topology, such as `checkpointing`.
    """
    model_shape = ModelShape(vision=MODEL_SHAPES["tiny"].vision, audio=MODEL_SHAPES["tiny"].audio, llm=shape)
    topology = parse(PipelineTopology, {**(schedule or {}), "units": {LLM: of_unit}}, "topology")
    topology = with_cuts(topology, model_shape, vocab_size=vocab_size, image=ImageSpec(), audio=AudioSpec())
    cuts = bounds(topology, model_shape, vocab_size=vocab_size, image=ImageSpec(), audio=AudioSpec())[LLM]
    groups, make_model = ProcessGroups.make(topology, device, tied=False), partial(_model, model_shape, vocab_size)
    built_on = device if change is None else torch.device("cpu")
    stages = build_stages(make_model, topology, topology.place(0), cuts, seed=0, device=built_on, slices=None, dtype=dtype)
    if change is not None:
        change(nn.ModuleList(stages))
        nn.ModuleList(stages).to(device)
    return PipelineStep(topology, {topology.place(0): stages}, groups, dtype=dtype)


def text_batch(lengths: Sequence[Sequence[int]], vocab_size: int) -> list[PackedMicrobatch]:
    """Return microbatches of random text with loss on every token, on the host."""
    rng, number, batch = np.random.default_rng(0), 0, []
    for of_microbatch in lengths:
        rows = []
        for length in of_microbatch:
            tokens = rng.integers(3, vocab_size, length, dtype=np.int32)
            row: dict[str, Any] = {name: [] for name in SCHEMA.names}
            rows.append(row | {"sample_id": number, "input_ids": tokens, "labels": tokens, "flags": 0})
            number += 1
        batch.append(packed(rows, UNIT_COLUMNS[LLM]))
    return batch


def _model(shape: ModelShape, vocab_size: int) -> MultimodalModel:
    with torch.device("meta"):
        return MultimodalModel(
            shape, vocab_size=vocab_size, image=ImageSpec(), audio=AudioSpec(), image_token_id=1, audio_token_id=2
        )
