"""One optimizer step of a disaggregated pipeline: forward, backward, gradient all-reduce, clipping by the norm, update."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from headrace.measured import MeasuredWork
from headrace.spec import AudioSpec, ImageSpec
from headrace.trainer.optimizer_spec import OptimizerSpec
from headrace.trainer.pipeline.buckets import Bucket
from headrace.trainer.pipeline.cargo import Feed
from headrace.trainer.pipeline.executor import Executor, Totals
from headrace.trainer.pipeline.kept_activations import measure_kept
from headrace.trainer.pipeline.memory_forecast import StageMemory, StateBytes
from headrace.trainer.pipeline.process_groups import ProcessGroups
from headrace.trainer.pipeline.routes import Routes
from headrace.trainer.pipeline.sharded_weights import Key, ShardedWeights, frozen_buckets, whole
from headrace.trainer.pipeline.stage import Stage
from headrace.trainer.pipeline.stage_building import LlmStage
from headrace.trainer.pipeline.tensor_parallel import cut_dimension
from headrace.trainer.pipeline.topology import PipelineTopology
from headrace.trainer.pipeline.zero1 import ShardedAdamW
from headrace.trainer.replica_check import check_replicas
from headrace.trainer.train_step import DEFAULTS, SkipPolicy, StepResult, embedding_parameters


class PipelineStep:
    """Runs one process's share of every step. Loss and gradient are those of `train_step.TrainStep` on the whole model.

    torch.distributed must be initialised. Each of its processes makes one and calls `run` with the routes of the same plans.
    """

    def __init__(
        self,
        topology: PipelineTopology,
        stages: Sequence[Stage],
        groups: ProcessGroups,
        *,
        dtype: torch.dtype = torch.float32,
        settings: OptimizerSpec = DEFAULTS,
    ) -> None:
        """`stages`: this process's stages, one for each chunk. `dtype`: torch.autocast dtype, one of `train_step.PRECISIONS`."""
        self.place = topology.place(dist.get_rank())
        self.stages = stages
        chunk_of = {p: chunk for chunk in reversed(range(len(stages))) for p in stages[chunk].parameters() if p.requires_grad}
        chunks = [[p for p in stage.parameters() if chunk_of.get(p) == chunk] for chunk, stage in enumerate(stages)]
        self.parameters = [parameter for parameters in chunks for parameter in parameters]  # each one once, also a tied matrix
        self._cut = {p for stage in stages for name, p in stage.model.named_parameters() if cut_dimension(name) is not None}
        self.topology = topology
        self._device = stages[0].device
        self._dtype = dtype
        self._autocast = torch.autocast(self._device.type, dtype, enabled=dtype != torch.float32)
        self.groups = groups
        self._tied = _tied_weight(stages) if groups.tied is not None else None
        self._max_grad_norm = settings.max_grad_norm
        self._skip_policy = SkipPolicy(settings)
        self.non_finite_samples: Sequence[int] = ()
        """Samples of this process's portions of the last step whose loss was not finite."""
        embeddings = embedding_parameters(nn.ModuleList(stages))
        partial = {p for stage in stages if stage.slices for p in stage.slices.partial}
        shared: list[tuple[set[nn.Parameter], dist.ProcessGroup]] = []
        if groups.tied is not None and self._tied is not None:
            shared.append(({self._tied}, groups.tied))
        if groups.slices is not None:
            shared.append((partial, groups.slices))
        self._shards_weights = topology.units[self.place.unit].shard_weights and groups.replicas is not None
        part_of = self._part_of() if self._shards_weights else None
        self.optimizer = ShardedAdamW(
            chunks, groups.replicas, settings=settings, embeddings=embeddings, shared=shared, part_of=part_of
        )
        self._bucket_of = self._shard(part_of) if part_of is not None else {}
        self._executor = Executor(topology, self.place, stages, dtype, groups.channels, backwards=self.optimizer)
        self.prepare = self._executor.prepare
        """Makes the cargo of portions for the feed of a step, also of an evaluation."""
        self._evaluator = Executor(topology.frozen(), self.place, stages, dtype, groups.channels)
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
        """Have the memory of every step forecast from now on, and kept within the limit of this process's unit. Collective.

        image, audio: of the job, for the samples on which the stages are measured. Raises UserError as `StageMemory` does.
        """
        kept = [
            measure_kept(
                stage, self.topology, self.place, chunk, dtype=self._dtype, image=image, audio=audio, slices=self.groups.slices
            )
            for chunk, stage in enumerate(self.stages)
        ]
        state = StateBytes.of(self.stages, self.optimizer, self._dtype)
        device_bytes = math.inf if self._device.type == "cpu" else torch.cuda.get_device_properties(self._device).total_memory
        self._executor.memory = StageMemory(
            self.topology, self.place, self.stages, kept, state, device_bytes=device_bytes, slices=self.groups.slices
        )
        return self._executor.memory

    def run(self, routes: Routes, feed: Feed, learning_rate: float) -> StepResult:
        """Run one step: forward and backward of this process's share, gradient all-reduce, clipping and update.

        If loss or gradient is not finite, weights and optimizer state stay as they are: the update is skipped, or HeadraceError
        is raised on all processes, as the settings say. The last stages of LLM and generator then name the samples.
        """
        result = self.accumulate(routes, feed)
        try:
            if result.target_weight:
                updates = self._skip_policy.may_update(result.loss, result.grad_norm, self.non_finite_samples)
                self._skip_policy.record(skipped=not updates)
                if updates:
                    self.optimizer.step(learning_rate)
        finally:
            self.discard()
        return replace(result, skipped=self._skip_policy.in_row if result.target_weight else 0)

    def accumulate(self, routes: Routes, feed: Feed) -> StepResult:
        """Run forward and backward, and leave the clipped gradients of the global batch in the parameters.

        The result has loss nan and gradient norm 0 if the global batch has no targets.
        """
        with self._autocast:  # around all microbatches: weights are cast once
            totals = self._executor.run(routes, feed)
            self._executor.wire.flush()
        loss_sum, target_weight = self._sum(totals)
        self.non_finite_samples = () if math.isfinite(loss_sum) else totals.non_finite_samples()
        if not target_weight:
            self.optimizer.reduce()  # replicas that had portions have begun sums, in which they wait for those that had none
            return StepResult(loss=math.nan, target_weight=0.0, grad_norm=0.0)
        return StepResult(loss=loss_sum / target_weight, target_weight=target_weight, grad_norm=self._reduce(target_weight))

    def evaluate(self, routes: Routes, feed: Feed) -> tuple[float, float]:
        """Run forward only. Return the loss sum of the global batch and the weight of its targets, over all processes."""
        with torch.no_grad(), self._autocast:
            totals = self._evaluator.run(routes, feed)
            self._evaluator.wire.flush()
        return self._sum(totals)

    def measured(self) -> Sequence[MeasuredWork]:
        """Return what this process has measured of the last step's actions."""
        return self._executor.clock.work()

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

    def discard(self) -> None:
        """Drop the gradients, also before the replay of a step that was not committed."""
        self.optimizer.discard()

    def _sum(self, totals: Totals) -> tuple[float, float]:
        """All-reduce loss and targets over all processes, counting only the first TP slice of a stage, as all have the same."""
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        if self.place.slice == 0:
            sums[0] += totals.loss_sum
            sums[1] += totals.target_weight
        dist.all_reduce(sums, group=self.groups.everybody)
        first, second = sums.tolist()
        return first, second

    def _reduce(self, target_weight: float) -> float:
        """All-reduce, average and clip the gradients. Return their norm over all units before clipping."""
        self.optimizer.reduce()
        counted = []
        for piece in self.optimizer.pieces:
            if piece.weight.grad is not None:
                piece.weight.grad.div_(target_weight)
                if not self.is_copy(piece.parameter):
                    counted.append(piece.weight.grad)
        squares = torch.nn.utils.get_total_norm(counted).to(self._device).double().square()
        dist.all_reduce(squares, group=self.groups.everybody)
        norm = squares.sqrt()
        weights = [piece.weight for piece in self.optimizer.pieces]
        torch.nn.utils.clip_grads_with_norm_(weights, self._max_grad_norm, norm)
        return float(norm)

    def is_copy(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter is a copy of one on this stage's first TP slice, or on the LLM's first stage (tied weight)."""
        return (parameter not in self._cut and self.place.slice > 0) or (parameter is self._tied and self.place.stage > 0)


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
