"""One optimizer step over a global batch, however its samples are spread over microbatches and ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headrace.errors import HeadraceError
from headrace.observability.logs import pairs
from headrace.trainer.gradients import sum_gradients
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.loading.steps import Step
from headrace.trainer.optimizer_spec import PEAK_LEARNING_RATES, OptimizerSpec

log = logging.getLogger(__name__)

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Dtypes of matrix products and of what stages send each other, by name.

Gradients, optimizer state and weights that learn are float32 with both; a pipeline stage holds frozen matrices in this dtype.
"""
DEFAULTS = OptimizerSpec()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The outcome of one optimizer step."""

    loss: float
    """Mean loss over all targets of the global batch, by their weights, in nats for text; NaN where it has no targets."""
    target_weight: float
    """What the loss is divided by: the number of targets in the global batch or, in a job with `weights`, the sum of theirs."""
    grad_norm: float
    """L2 norm of the gradient over all parameters, before clipping; 0 where there are no targets."""
    skipped: int = 0
    """Consecutive steps, up to this one, whose update was skipped because it was not finite; 0 if this one was not skipped."""

    @property
    def recorded_loss(self) -> float:
        """The loss as recorded in the ledger: NaN if it is not finite."""
        return self.loss if math.isfinite(self.loss) else math.nan


class TrainStep:
    """Accumulates the gradients of a global batch, microbatch by microbatch, and applies one optimizer step.

    The loss of a step is the sum over all targets of the global batch divided by their number, or their weight. So neither the
    order of samples nor their division into microbatches and ranks changes it or its gradient, up to the order of floating-point
    additions.
    Where torch.distributed is initialised, every rank of `group` holds the whole model, calls `accumulate` once per microbatch
    that it has (possibly never) and then `finish` once.

        for step in loader:
            for microbatch in step:
                train_step.accumulate(microbatch.data)
            result = train_step.finish(settings.rate(step.index))
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        dtype: torch.dtype = torch.float32,
        settings: OptimizerSpec = DEFAULTS,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`model` maps a PackedMicrobatch on the host to a StepLoss. `dtype`: one of PRECISIONS, applied by torch.autocast.
        `settings`: used for gradient clipping and for steps that are not finite.
        """
        self._model = model
        self._optimizer = optimizer
        self._max_grad_norm = settings.max_grad_norm
        self._skip_policy = SkipPolicy(settings)
        self._group = group
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._device = self._parameters[0].device
        self._autocast = torch.autocast(self._device.type, dtype, enabled=dtype != torch.float32)
        self.discard()

    def accumulate(self, microbatch: PackedMicrobatch) -> None:
        """Add the loss and the gradients of one microbatch, which the model copies to its device."""
        with self._autocast:
            loss = self._model(microbatch)
        if loss.target_weight or loss.is_shared:
            loss.loss_sum.backward()
        self._loss_sum += loss.loss_sum.detach()
        self._target_weight += loss.target_weight

    def evaluate(self, steps: Iterable[Step]) -> tuple[float, float]:
        """Return the loss sum and the weight of all targets of an evaluation (`StepLoader.evaluate`), over all ranks.

        Nothing is accumulated.
        """
        totals = torch.zeros(2, dtype=torch.float64, device=self._device)
        training = self._model.training
        self._model.eval()
        try:
            with torch.no_grad(), self._autocast:
                for loss in (self._model(microbatch.data) for step in steps for microbatch in step):
                    totals[0] += loss.loss_sum
                    totals[1] += loss.target_weight
        finally:
            self._model.train(training)
        if dist.is_initialized():
            dist.all_reduce(totals, group=self._group)
        loss_sum, target_weight = totals.tolist()
        return loss_sum, target_weight

    def finish(self, learning_rate: float | None = None) -> StepResult:
        """Update the weights with the gradients accumulated on all ranks, and clear them for the next step.

        A global batch without targets changes neither weights nor optimizer state. Nor does one whose loss or gradient norm is
        not finite: depending on the settings it is skipped, or HeadraceError is raised on all ranks. `learning_rate`: of this
        step; None: the optimizer keeps its own.
        """
        loss_sum, target_weight = self._reduce()
        if target_weight == 0:
            self.discard()
            return StepResult(loss=math.nan, target_weight=0.0, grad_norm=0.0)
        for gradient in self._gradients():
            gradient.div_(target_weight)
        grad_norm = float(nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm))
        loss = loss_sum / target_weight
        try:
            updates = self._skip_policy.may_update(loss, grad_norm)
            self._skip_policy.record(skipped=not updates)
            if updates:
                if learning_rate is not None:
                    for options in self._optimizer.param_groups:
                        options["lr"] = learning_rate
                self._optimizer.step()
        finally:
            self.discard()
        return StepResult(loss=loss, target_weight=target_weight, grad_norm=grad_norm, skipped=self._skip_policy.in_row)

    def discard(self) -> None:
        """Clear the accumulated loss and gradients, for example before a step that was not committed is replayed."""
        self._optimizer.zero_grad(set_to_none=True)
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        self._target_weight = 0.0

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def _reduce(self) -> tuple[float, float]:
        """All-reduce the gradients in place, and return the loss and the weight of targets summed over the ranks.

        A parameter without a gradient on any rank keeps none.
        """
        if not dist.is_initialized():
            return float(self._loss_sum), self._target_weight
        loss_sum, target_weight = sum_gradients(self._parameters, self._group, [float(self._loss_sum), self._target_weight])
        return loss_sum, target_weight


def as_logged(target_weight: float) -> float:
    """Return a weight of targets as it is logged: their number, an int, where they have no weights."""
    return int(target_weight) if target_weight.is_integer() else target_weight


class SkipPolicy:
    """Counts steps whose update is skipped as not finite, and decides whether training may go on without it.

    All processes of a job count and decide alike.
    """

    def __init__(self, settings: OptimizerSpec) -> None:
        self._settings = settings
        self.in_row = 0
        """Consecutive steps skipped up to now; 0 after a step that was not skipped."""
        self.total = 0
        """Steps skipped in this run."""

    def may_update(self, loss: float, grad_norm: float, samples: Sequence[int] = ()) -> bool:
        """Return whether loss and gradient norm are finite, so that the update may be applied; if not, it must be skipped.

        `samples`: those of the microbatches whose loss is not finite, named in the error. Raises HeadraceError, before anything
        is updated, where the settings forbid skipping or too many steps have been skipped.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return True
        settings, why = self._settings, ""
        if settings.on_nan == "skip":
            if self.in_row < settings.max_skips_in_row and self.total < settings.max_skips:
                return False
            why = (
                f", the {self.in_row} before it were skipped as well (optimizer.max_skips_in_row)"
                if self.in_row >= settings.max_skips_in_row
                else f", {self.total} were skipped before (optimizer.max_skips)"
            )
        names = f" in a microbatch of the samples {', '.join(map(str, samples))}" if samples else ""
        raise HeadraceError(
            f"the step is not finite (loss {loss}, gradient norm {grad_norm}){names}{why}; "
            "it is not committed, and the weights are as before it"
        )

    def record(self, *, skipped: bool) -> None:
        """Count a step that had targets as skipped or not."""
        self.in_row = self.in_row + 1 if skipped else 0
        self.total += skipped


def make_optimizer(
    parameters: Iterable[nn.Parameter], settings: OptimizerSpec = DEFAULTS, *, embeddings: Collection[nn.Parameter] = ()
) -> torch.optim.AdamW:
    """Return AdamW over the parameters that require gradients, at the peak learning rate until another one is set.

    `embeddings`: the embedding tables among them (see `embedding_parameters`), which may be exempt from weight decay.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    decaying = [parameter for parameter in trained if decays(parameter, settings, embeddings)]
    return adamw(decaying, [parameter for parameter in trained if not decays(parameter, settings, embeddings)], settings)


def decays(parameter: nn.Parameter, settings: OptimizerSpec, embeddings: Collection[nn.Parameter]) -> bool:
    """Whether weight decay applies to a parameter: to matrices, but for embedding tables if the settings exempt them."""
    return parameter.ndim >= 2 and (settings.decay_embeddings is not False or parameter not in embeddings)


def adamw(decaying: Sequence[nn.Parameter], exempt: Sequence[nn.Parameter], settings: OptimizerSpec) -> torch.optim.AdamW:
    """Return AdamW with the settings' weight decay for some parameters, and without for others."""
    groups = [{"params": decaying, "weight_decay": settings.weight_decay}, {"params": exempt, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=settings.learning_rate or PEAK_LEARNING_RATES["tiny"], betas=settings.betas, eps=settings.eps, fused=True
    )


def embedding_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Return the weights of all nn.Embedding modules in `module`, including one that is tied to the output head."""
    return {parameter for one in module.modules() if isinstance(one, nn.Embedding) for parameter in one.parameters()}


def log_step(job: str, step: Step, result: StepResult, non_finite_samples: Sequence[int] = ()) -> None:
    """Log a committed step, after a warning where its update was skipped.

    `non_finite_samples`: samples of this process's microbatches whose loss was not finite, named in the warning.
    """
    if result.skipped:
        log.warning(
            "update skipped, the step is not finite %s",
            pairs(
                job=job,
                step=step.index,
                loss=result.loss,
                grad_norm=result.grad_norm,
                skipped_in_row=result.skipped,
                samples=",".join(map(str, non_finite_samples)) or "unknown",
            ),
        )
    log.info(
        "step %s",
        pairs(
            job=job,
            step=step.index,
            loss=result.loss,
            targets=as_logged(result.target_weight),
            grad_norm=result.grad_norm,
            data_wait_s=step.data_wait_s,
        ),
    )
