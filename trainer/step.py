"""One optimizer step over a global batch, however its samples are spread over microbatches and ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headrace.errors import HeadraceError
from trainer.collate import PackedMicrobatch
from trainer.gradients import sum_gradients

# Of AdamW with a warm-up of a few steps. 7b to 9b as Llama 2 7B and Llama 3 8B, 70b as Llama 3 70B, 1b and 3b a little above
# them; tiny and small are ours: the largest that fall smoothly from a random start on a few dozen short samples.
PEAK_LEARNING_RATES = {
    "tiny": 3e-3,
    "tiny-generator": 3e-3,
    "small": 1e-3,
    "1b": 4e-4,
    "3b": 4e-4,
    "7b": 3e-4,
    "8b": 3e-4,
    "9b": 3e-4,
    "70b": 1.5e-4,
}

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Of matrix products and of what is sent; weights, gradients and optimizer are float32 with both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a finished step did."""

    loss: float
    """Mean over all targets of the global batch, of text in nats; NaN where there are none."""
    num_targets: int
    """Of the global batch: the denominator of the loss."""
    grad_norm: float
    """L2 norm over all parameters before clipping; 0 where there are no targets."""


class TrainStep:
    """The loss of a step is the sum over all targets of the global batch divided by their number.

    So neither the order of samples nor their division into microbatches and ranks changes it or its gradient, up to the order
    of floating-point additions. Where torch.distributed is initialised, every rank of `group` holds the whole model and calls
    `accumulate` as often as it has microbatches (also never) and then `finish` once.

        for step in loader:
            for microbatch in step:
                train_step.accumulate(microbatch.data)
            result = train_step.finish(learning_rate(step.index, peak=3e-3))
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        dtype: torch.dtype = torch.float32,
        max_grad_norm: float = 1.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`model` maps a PackedMicrobatch to a StepLoss. `dtype`: one of PRECISIONS, by torch.autocast."""
        self._model = model
        self._optimizer = optimizer
        self._max_grad_norm = max_grad_norm
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

        A global batch without targets changes nothing, neither weights nor optimizer state. Raises HeadraceError, with
        weights and optimizer state unchanged on all ranks, where the loss or the gradient is not finite.
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
            check_finite(loss, grad_norm)
        except HeadraceError:
            self.discard()
            raise
        if learning_rate is not None:
            for options in self._optimizer.param_groups:
                options["lr"] = learning_rate
        self._optimizer.step()
        self.discard()
        return StepResult(loss=loss, num_targets=num_targets, grad_norm=grad_norm)

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


def check_finite(loss: float, grad_norm: float, samples: Sequence[int] = ()) -> None:
    """Raise HeadraceError, before anything is updated, where either is no number. samples: of microbatches whose loss is none."""
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        names = f" in a microbatch of the samples {', '.join(map(str, samples))}" if samples else ""
        raise HeadraceError(
            f"the step is not finite (loss {loss}, gradient norm {grad_norm}){names}; "
            "it is not committed, and the weights are as before it"
        )


def make_optimizer(model: nn.Module, *, lr: float = PEAK_LEARNING_RATES["tiny"], weight_decay: float = 0.1) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) with the betas of Llama 2 (section 2.2); matrices decay, biases and norms do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=True)


def learning_rate(step: int, *, peak: float, warmup_steps: int = 3, total_steps: int | None = None, floor: float = 0.1) -> float:
    """Linear warm-up to `peak`, then a cosine down to `floor * peak` at `total_steps`; constant where that is None.

    `step` counts from 0. Step 0 already learns: its rate is peak / (warmup_steps + 1).
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if total_steps is None:
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
