"""One optimizer step of a disaggregated pipeline: forward, backward, sum of gradients, clipping by the norm, update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from headrace.trainer.optimizer_spec import OptimizerSpec
from headrace.trainer.pipeline.cargo import Feed
from headrace.trainer.pipeline.executor import run_step
from headrace.trainer.pipeline.place_step import PlaceStep
from headrace.trainer.pipeline.process_groups import ProcessGroups
from headrace.trainer.pipeline.routes import Routes
from headrace.trainer.pipeline.send_receive import Wire
from headrace.trainer.pipeline.stage import Stage
from headrace.trainer.pipeline.step_run import Totals
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from headrace.trainer.train_step import DEFAULTS, SkipPolicy, StepResult


class PipelineStep:
    """Runs one process's share of every step. Loss and gradient are those of `train_step.TrainStep` on the whole model.

    torch.distributed must be initialised. Each of its processes makes one and calls `run` with the routes of the same plans.
    """

    def __init__(
        self,
        topology: PipelineTopology,
        stages: Mapping[Place, Sequence[Stage]],
        groups: ProcessGroups,
        *,
        dtype: torch.dtype = torch.float32,
        settings: OptimizerSpec = DEFAULTS,
    ) -> None:
        """`stages`: of each of this process's places, one for each chunk. `dtype`: torch.autocast dtype, one of
        `train_step.PRECISIONS`.
        """
        self.topology, self.groups = topology, groups
        self.device = next(iter(stages.values()))[0].device
        self._wire = Wire(groups.channels, self.device, dtype)
        self.places = [
            PlaceStep(topology, place, of_place, groups.of_place[place], self._wire, dtype=dtype, settings=settings)
            for place, of_place in stages.items()
        ]
        """In pipeline order of their units; more than one where units share this process's rank."""
        self._autocast = torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)
        self._max_grad_norm = settings.max_grad_norm
        self._skip_policy = SkipPolicy(settings)
        self.non_finite_samples: Sequence[int] = ()
        """Samples of this process's portions of the last step whose loss was not finite."""

    @property
    def forecast_bytes(self) -> float:
        """What the last step was forecast to take of the device, over all places; 0 where nobody forecasts."""
        memories = [place.executor.memory for place in self.places]
        return sum(memory.forecast.total for memory in memories if memory is not None and memory.forecast is not None)

    def run(self, routes: Routes, feeds: Sequence[Feed], learning_rate: float) -> StepResult:
        """Run one step: forward and backward of this process's share, sum of gradients, clipping and update.

        `feeds`: of each of `places`. If loss or gradient is not finite, weights and optimizer state stay as they are: the update
        is skipped, or HeadraceError is raised on all processes, as the settings say. The last stages of LLM and generator then
        name the samples.
        """
        result = self.accumulate(routes, feeds)
        try:
            if result.target_weight:
                updates = self._skip_policy.may_update(result.loss, result.grad_norm, self.non_finite_samples)
                self._skip_policy.record(skipped=not updates)
                if updates:
                    for place in self.places:
                        place.optimizer.step(learning_rate)
        finally:
            self.discard()
        return replace(result, skipped=self._skip_policy.in_row if result.target_weight else 0)

    def accumulate(self, routes: Routes, feeds: Sequence[Feed]) -> StepResult:
        """Run forward and backward, and leave the clipped gradients of the global batch in the parameters.

        The result has loss nan and gradient norm 0 if the global batch has no targets.
        """
        with self._autocast:  # around all microbatches: weights are cast once
            totals = run_step([place.executor for place in self.places], routes, feeds)
            self._wire.flush()
        loss_sum, target_weight = self._sum(totals)
        for place in self.places:
            place.executor.clock.mark()
        is_finite = math.isfinite(loss_sum)
        self.non_finite_samples = () if is_finite else [one for some in totals for one in some.non_finite_samples()]
        if not target_weight:
            for place in self.places:
                place.optimizer.reduce()  # replicas that had portions have begun sums, in which they wait for those without
            return StepResult(loss=math.nan, target_weight=0.0, grad_norm=0.0)
        return StepResult(loss=loss_sum / target_weight, target_weight=target_weight, grad_norm=self._reduce(target_weight))

    def evaluate(self, routes: Routes, feeds: Sequence[Feed]) -> tuple[float, float]:
        """Run forwards only. Return the loss sum of the global batch and the weight of its targets, over all processes."""
        with torch.no_grad(), self._autocast:
            totals = run_step([place.evaluator for place in self.places], routes, feeds)
            self._wire.flush()
        return self._sum(totals)

    def discard(self) -> None:
        """Drop the gradients, also before the replay of a step that was not committed."""
        for place in self.places:
            place.optimizer.discard()

    def _sum(self, totals: Sequence[Totals]) -> tuple[float, float]:
        """All-reduce loss and targets over all processes, counting only the first TP slice of a stage, as all have the same.

        Those that share sequences have parts of both.
        """
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for place, of_place in zip(self.places, totals, strict=True):
            if self.topology.units[place.place.unit].tensor_slice(place.place) == 0:
                sums[0] += of_place.loss_sum
                sums[1] += of_place.target_weight
        dist.all_reduce(sums, group=self.groups.everybody)
        first, second = sums.tolist()
        return first, second

    def _reduce(self, target_weight: float) -> float:
        """Average and clip the gradients, which the replicas have summed. Return their norm over all units before clipping."""
        counted = [gradient for place in self.places for gradient in place.average(target_weight)]
        squares = torch.nn.utils.get_total_norm(counted).to(self.device).double().square()
        dist.all_reduce(squares, group=self.groups.everybody)
        norm = squares.sqrt()
        weights = [piece.weight for place in self.places for piece in place.optimizer.pieces]
        torch.nn.utils.clip_grads_with_norm_(weights, self._max_grad_norm, norm)
        return float(norm)
