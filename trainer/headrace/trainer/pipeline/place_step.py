"""What one place has and does of a step besides its actions: weights, optimizer, memory, and their groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

from headrace.spec import AudioSpec, ImageSpec
from headrace.trainer.optimizer_spec import OptimizerSpec
from headrace.trainer.pipeline.buckets import Bucket
from headrace.trainer.pipeline.executor import Executor
from headrace.trainer.pipeline.kept_activations import measure_kept
from headrace.trainer.pipeline.memory_forecast import StageMemory, StateBytes
from headrace.trainer.pipeline.process_groups import PlaceGroups
from headrace.trainer.pipeline.send_receive import Wire
from headrace.trainer.pipeline.sharded_weights import Key, ShardedWeights, frozen_buckets, whole
from headrace.trainer.pipeline.stage import Stage
from headrace.trainer.pipeline.stage_building import LlmStage
from headrace.trainer.pipeline.tensor_parallel import cut_dimension
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from headrace.trainer.pipeline.zero1 import ShardedAdamW
from headrace.trainer.replica_check import check_replicas
from headrace.trainer.train_step import embedding_parameters


class PlaceStep:
    """One place of this process in every step."""

    def __init__(
        self,
        topology: PipelineTopology,
        place: Place,
        stages: Sequence[Stage],
        groups: PlaceGroups,
        wire: Wire,
        *,
        dtype: torch.dtype,
        settings: OptimizerSpec,
    ) -> None:
        """`stages`: of the place, one for each chunk. `wire`: of the process. `dtype`: torch.autocast dtype."""
        self.topology, self.place, self.stages, self.groups = topology, place, stages, groups
        chunk_of = {p: chunk for chunk in reversed(range(len(stages))) for p in stages[chunk].parameters() if p.requires_grad}
        chunks = [[p for p in stage.parameters() if chunk_of.get(p) == chunk] for chunk, stage in enumerate(stages)]
        self.parameters = [parameter for parameters in chunks for parameter in parameters]  # each one once, also a tied matrix
        self._cut = {p for stage in stages for name, p in stage.model.named_parameters() if cut_dimension(name) is not None}
        self._device = stages[0].device
        self._dtype = dtype
        self._tied = _tied_weight(stages) if groups.tied is not None else None
        embeddings = embedding_parameters(nn.ModuleList(stages))
        partial = {p for stage in stages if stage.slices for p in stage.slices.partial}
        shared: list[tuple[set[nn.Parameter], dist.ProcessGroup]] = []
        if groups.tied is not None and self._tied is not None:
            shared.append(({self._tied}, groups.tied))
        if groups.slices is not None:
            shared.append((partial, groups.slices))
        self._shards_weights = topology.units[place.unit].shard_weights and groups.replicas is not None
        part_of = self._part_of() if self._shards_weights else None
        self.optimizer = ShardedAdamW(
            chunks, groups.replicas, settings=settings, embeddings=embeddings, shared=shared, part_of=part_of
        )
        self._bucket_of = self._shard(part_of) if part_of is not None else {}
        self.executor = Executor(topology, place, stages, wire, backwards=self.optimizer)
        self.evaluator = Executor(topology.frozen(), place, stages, wire)
        """Runs forwards only."""
        self.prepare = self.executor.prepare
        """Makes the cargo of portions for the feed of a step, also of an evaluation."""
        if groups.replicas is not None and not self._shards_weights:
            for stage in stages:
                _wait_before(stage, self.optimizer)

    def _part_of(self) -> dict[nn.Parameter, int]:
        """Return a number for each part of a stage, by its parameters. Raises UserError if replicas have other weights."""
        self.check_replicas()
        parts = [part for stage in self.stages for part in stage.parts()]
        return {parameter: number for number, part in reversed([*enumerate(parts)]) for parameter in part}

    def _shard(self, part_of: Mapping[nn.Parameter, int]) -> Mapping[nn.Parameter, Bucket]:
        """Have this replica keep its shard of all weights, and the stages gather them. Return the bucket of each parameter."""
        group = self.groups.replicas
        assert group is not None, "there are replicas"
        frozen = {parameter: number for parameter, number in part_of.items() if not parameter.requires_grad}
        bucket_of = {**self.optimizer.bucket_of, **frozen_buckets(frozen, group)}
        for stage in self.stages:
            parts = [list(dict.fromkeys(bucket_of[parameter] for parameter in part)) for part in stage.parts()]
            stage.sharded = ShardedWeights(parts, group)
        return bucket_of

    def whole(self, held: Iterable[tuple[Key, nn.Parameter]], *, writes: bool = False) -> Iterator[tuple[Key, nn.Parameter]]:
        """Yield parameters of this process, each while its values are there (`sharded_weights.whole`). Collective."""
        return whole(held, self._bucket_of, self.groups.replicas, writes=writes)

    def forecast_memory(self, image: ImageSpec, audio: AudioSpec) -> StageMemory:
        """Have the memory of every step forecast from now on, and kept within the limit of this place's unit. Collective.

        image, audio: of the job, for the samples on which the stages are measured. Raises UserError as `StageMemory` does.
        """
        groups = [group for group in (self.groups.slices, self.groups.context) if group is not None]
        kept = [
            measure_kept(stage, self.topology, self.place, chunk, dtype=self._dtype, image=image, audio=audio, groups=groups)
            for chunk, stage in enumerate(self.stages)
        ]
        state = StateBytes.of(self.stages, self.optimizer, self._dtype)
        device_bytes = math.inf if self._device.type == "cpu" else torch.cuda.get_device_properties(self._device).total_memory
        self.executor.memory = StageMemory(
            self.topology, self.place, self.stages, kept, state, device_bytes=device_bytes, groups=groups
        )
        return self.executor.memory

    def check_replicas(self, step: int | None = None) -> None:
        """Compare this stage's weights with those of its other replicas (`agreement.check_replicas`). Collective.

        Where each has a shard of them, there is nothing to compare.
        """
        if self.stages[0].sharded is not None:
            return
        if step is not None:
            self.optimizer.wait()
        named = (one for stage in self.stages for one in stage.model.named_parameters())
        check_replicas(named, self.groups.replicas, f"stage {self.place.stage} of {self.place.unit}", self._device, step=step)

    def average(self, target_weight: float) -> list[torch.Tensor]:
        """Sum the gradients over the replicas and divide them by the number of targets. Return those that count for the norm of
        the gradient over all places. Collective.
        """
        with nullcontext() if self.groups.replicas is None else self.executor.clock.reducing():
            self.optimizer.reduce()
        counted = []
        for piece in self.optimizer.pieces:
            if piece.weight.grad is not None:
                piece.weight.grad.div_(target_weight)
                if not self.is_copy(piece.parameter):
                    counted.append(piece.weight.grad)
        return counted

    def is_copy(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter is a copy of one on this stage's first TP slice, or on the LLM's first stage (tied weight)."""
        in_slices = parameter not in self._cut and self.topology.units[self.place.unit].tensor_slice(self.place) > 0
        return in_slices or (parameter is self._tied and self.place.stage > 0)

    @property
    def is_first_replica(self) -> bool:
        """Whether this is the first of the places with the same weights."""
        return self.groups.replicas is None or dist.get_rank(self.groups.replicas) == 0


def _tied_weight(stages: Sequence[Stage]) -> nn.Parameter | None:
    """Return the tied matrix of embedding and head if one of these stages is the LLM's first or last, in different processes."""
    for stage in stages:
        if isinstance(stage, LlmStage) and stage.is_tied and (stage.is_first or stage.is_last):
            weight = stage.model.decoder.embed.weight
            assert isinstance(weight, nn.Parameter)
            return weight
    return None


def _wait_before(stage: Stage, optimizer: ShardedAdamW) -> None:
    """Make each layer of a stage wait for its weights before it runs, and the stage for those outside of layers."""
    in_layers: set[nn.Parameter] = set()
    for layer in stage.layers:
        wait = optimizer.waiting_for(layer.parameters())
        layer.register_forward_pre_hook(lambda *_, wait=wait: wait())
        in_layers.update(layer.parameters())
    wait = optimizer.waiting_for(parameter for parameter in stage.parameters() if parameter not in in_layers)
    stage.register_forward_pre_hook(lambda *_: wait())
