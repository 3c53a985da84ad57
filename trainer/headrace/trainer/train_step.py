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
"""Of matrix products and of what is sent; weights, gradients and optimizer are float32 with both."""
DEFAULTS = OptimizerSpec()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a finished step did."""

    loss: float
    """Mean over all targets of the global batch, of text in nats; NaN where there are none."""
    num_targets: int
    """Of the global batch: the denominator of the loss."""
    grad_norm: float
    """L2 norm over all parameters before clipping; 0 where there are no targets."""
    skipped: int = 0
    """Steps in a row, this one the last of them, whose update was left out as it was no number. 0: it was not."""

    @property
    def recorded_loss(self) -> float:
        """For the ledger, which has NaN for all that is no number."""
        return self.loss if math.isfinite(self.loss) else math.nan


class TrainStep:
    """The loss of a step is the sum over all targets of the global batch divided by their number.

    So neither the order of samples nor their division into microbatches and ranks changes it or its gradient, up to the order
    of floating-point additions. Where torch.distributed is initialised, every rank of `group` holds the whole model and calls
    `accumulate` as often as it has microbatches (also never) and then `finish` once.

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
        """`model` maps a PackedMicrobatch to a StepLoss. `dtype`: one of PRECISIONS, by torch.autocast. `settings`: for clipping,
        and for a step that is no number.
        """
        self._model = model
        self._optimizer = optimizer
        self._max_grad_norm = settings.max_grad_norm
        self._skips = Skips(settings)
        self._group = group
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._device = self._parameters[0].device
        self._autocast = torch.autocast(self._device.type, dtype, enabled=dtype != torch.float32)
        self.discard()

    def accumulate(self, microbatch: PackedMicrobatch) -> None:
        """Adds the loss and the gradients of one microbatch; copies it to the model's device where it is elsewhere."""
        with self._autocast:
            loss = self._model(microbatch.to(self._device))
        if loss.num_targets:
            loss.loss_sum.backward()
        self._loss_sum += loss.loss_sum.detach()
        self._num_targets += loss.num_targets

    def finish(self, learning_rate: float | None = None) -> StepResult:
        """Updates the weights from what has been accumulated on all ranks, and starts the next step.

        A global batch without targets changes nothing, neither weights nor optimizer state. Nor does one whose loss or gradient
        is not finite: it is skipped, or HeadraceError is raised on all ranks, as the settings say.
        """
        loss_sum, num_targets = self._reduce()
        if num_targets == 0:
            self.discard()
            return StepResult(loss=math.nan, num_targets=0, grad_norm=0.0)
        for gradient in self._gradients():
            gradient.div_(num_targets)
        grad_norm = float(nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm))
        loss = loss_sum / num_targets
        try:
            updates = self._skips.is_finite(loss, grad_norm)
            self._skips.count(skipped=not updates)
            if updates:
                if learning_rate is not None:
                    for options in self._optimizer.param_groups:
                        options["lr"] = learning_rate
                self._optimizer.step()
        finally:
            self.discard()
        return StepResult(loss=loss, num_targets=num_targets, grad_norm=grad_norm, skipped=self._skips.in_row)

    def discard(self) -> None:
        """Forgets what has been accumulated, as before the replay of a step that was not committed."""
        self._optimizer.zero_grad(set_to_none=True)
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        self._num_targets = 0

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def _reduce(self) -> tuple[float, int]:
        """Sums gradients, loss and targets over the ranks. A parameter without a gradient on any rank keeps none."""
        if not dist.is_initialized():
            return float(self._loss_sum), self._num_targets
        loss_sum, num_targets = sum_gradients(self._parameters, self._group, [float(self._loss_sum), self._num_targets])
        return loss_sum, int(num_targets)


class Skips:
    """Steps that are no number, and whether training goes on without their updates. Equal on all processes of a job."""

    def __init__(self, settings: OptimizerSpec) -> None:
        self._settings = settings
        self.in_row = 0
        """Of the last steps."""
        self.total = 0
        """Of this run."""

    def is_finite(self, loss: float, grad_norm: float, samples: Sequence[int] = ()) -> bool:
        """Whether the step's update may be taken; where not, it is to be skipped. samples: of microbatches whose loss is none.

        Raises HeadraceError, before anything is updated, where steps are not to be skipped, or too many were.
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

    def count(self, *, skipped: bool) -> None:
        """A step that had targets."""
        self.in_row = self.in_row + 1 if skipped else 0
        self.total += skipped


def make_optimizer(
    parameters: Iterable[nn.Parameter], settings: OptimizerSpec = DEFAULTS, *, embeddings: Collection[nn.Parameter] = ()
) -> torch.optim.AdamW:
    """Of those that learn. embeddings: some of them, as of `embeddings_of`. Its rate is the peak, until it is set."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    exempt = set() if settings.decay_embeddings is not False else set(embeddings)
    decays = [parameter for parameter in trained if parameter.ndim >= 2 and parameter not in exempt]
    kept = [parameter for parameter in trained if parameter.ndim < 2 or parameter in exempt]
    groups = [{"params": decays, "weight_decay": settings.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=settings.learning_rate or PEAK_LEARNING_RATES["tiny"], betas=settings.betas, eps=settings.eps, fused=True
    )


def embeddings_of(module: nn.Module) -> set[nn.Parameter]:
    """The tables of its embeddings, whatever else they are."""
    return {parameter for one in module.modules() if isinstance(one, nn.Embedding) for parameter in one.parameters()}


def log_step(job: str, step: Step, result: StepResult, not_finite: Sequence[int] = ()) -> None:
    """A line on a committed step, and a warning where its update was skipped. `not_finite`: samples that this process blames."""
    if result.skipped:
        log.warning(
            "update skipped, the step is not finite %s",
            pairs(
                job=job,
                step=step.index,
                loss=result.loss,
                grad_norm=result.grad_norm,
                skipped_in_row=result.skipped,
                samples=",".join(map(str, not_finite)) or "unknown",
            ),
        )
    log.info(
        "step %s",
        pairs(
            job=job,
            step=step.index,
            loss=result.loss,
            targets=result.num_targets,
            grad_norm=result.grad_norm,
            data_wait_s=step.data_wait_s,
        ),
    )
