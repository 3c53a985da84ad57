"""One optimizer step of a disaggregated pipeline: forward, backward, gradient all-reduce, clipping by the norm, update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from headrace.measured import MeasuredWork
from headrace.trainer.gradients import sum_gradients
from headrace.trainer.optimizer_spec import OptimizerSpec
from headrace.trainer.pipeline.executor import Executor, Feed
from headrace.trainer.pipeline.process_groups import ProcessGroups
from headrace.trainer.pipeline.routes import Routes
from headrace.trainer.pipeline.stage import Stage
from headrace.trainer.pipeline.stage_building import LlmStage
from headrace.trainer.pipeline.tensor_parallel import cut_dimension
from headrace.trainer.pipeline.topology import PipelineTopology
from headrace.trainer.pipeline.zero1 import COPIES, ShardedAdamW
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
        copies: int = COPIES,
    ) -> None:
        """`stages`: this process's stages, one for each chunk. `dtype`: torch.autocast dtype, one of `train_step.PRECISIONS`.
        `copies`: number of replicas that hold the optimizer state of each parameter.
        """
        self.place = topology.place(dist.get_rank())
        self.stages = stages
        self.parameters = [p for p in nn.ModuleList(stages).parameters() if p.requires_grad]
        self._cut = {p for stage in stages for name, p in stage.model.named_parameters() if cut_dimension(name) is not None}
        self._partial = [p for stage in stages if stage.slices for p in stage.slices.partial if p.requires_grad]
        self.topology = topology
        self._device = stages[0].device
        self._autocast = torch.autocast(self._device.type, dtype, enabled=dtype != torch.float32)
        self._executor = Executor(topology, self.place, stages, dtype)
        self.groups = groups
        self._tied = _tied_weight(stages) if groups.tied is not None else None
        self._max_grad_norm = settings.max_grad_norm
        self._skip_policy = SkipPolicy(settings)
        self.non_finite_samples: Sequence[int] = ()
        """Samples of this process's portions of the last step whose loss was not finite."""
        embeddings = embedding_parameters(nn.ModuleList(stages))
        self.optimizer = ShardedAdamW(self.parameters, groups.replicas, copies=copies, settings=settings, embeddings=embeddings)

    def run(self, routes: Routes, feed: Feed, learning_rate: float) -> StepResult:
        """Run one step: forward and backward of this process's share, gradient all-reduce, clipping and update.

        If loss or gradient is not finite, weights and optimizer state stay as they are: the update is skipped, or HeadraceError
        is raised on all processes, as the settings say. The last stages of LLM and generator then name the samples.
        """
        result = self.accumulate(routes, feed)
        try:
            if result.num_targets:
                updates = self._skip_policy.may_update(result.loss, result.grad_norm, self.non_finite_samples)
                self._skip_policy.record(skipped=not updates)
                if updates:
                    self.optimizer.step(learning_rate)
        finally:
            self.discard()
        return replace(result, skipped=self._skip_policy.in_row if result.num_targets else 0)

    def accumulate(self, routes: Routes, feed: Feed) -> StepResult:
        """Run forward and backward, and leave the clipped gradients of the global batch in the parameters.

        The result has loss nan and gradient norm 0 if the global batch has no targets.
        """
        with self._autocast:  # around all microbatches: weights are cast once
            totals = self._executor.run(routes, feed)
            self._executor.wire.flush()
        self.non_finite_samples = totals.non_finite_samples
        loss_sum, num_targets = self._sum(totals.loss_sum, totals.num_targets)
        if not num_targets:
            return StepResult(loss=math.nan, num_targets=0, grad_norm=0.0)
        return StepResult(loss=loss_sum / num_targets, num_targets=int(num_targets), grad_norm=self._reduce(num_targets))

    def measured(self) -> Sequence[MeasuredWork]:
        """Return what this process has measured of the last step's actions."""
        return self._executor.clock.work()

    def discard(self) -> None:
        """Drop the gradients, also before the replay of a step that was not committed."""
        for parameter in self.parameters:
            parameter.grad = None

    def _sum(self, loss_sum: float, num_targets: int) -> tuple[float, float]:
        """All-reduce loss and targets over all processes, counting only the first TP slice of a stage, as all have the same."""
        counts = self.place.slice == 0
        totals = torch.tensor([loss_sum * counts, num_targets * counts], dtype=torch.float64, device=self._device)
        dist.all_reduce(totals, group=self.groups.everybody)
        first, second = totals.tolist()
        return first, second

    def _reduce(self, num_targets: float) -> float:
        """All-reduce, average and clip the gradients. Return their norm over all units before clipping."""
        if self._partial:
            sum_gradients(self._partial, self.groups.slices)
        if self.groups.replicas is not None and self.parameters:
            sum_gradients(self.parameters, self.groups.replicas)
        if self._tied is not None and self._tied.requires_grad:
            sum_gradients([self._tied], self.groups.tied)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        for gradient in gradients:
            gradient.div_(num_targets)
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        if self.place.replica == 0:
            counted = [p.grad for p in self.parameters if p.grad is not None and not self.is_copy(p)]
            squares += torch.nn.utils.get_total_norm(counted).double().square()
        dist.all_reduce(squares, group=self.groups.everybody)
        norm = squares.sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.parameters, self._max_grad_norm, norm)
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
