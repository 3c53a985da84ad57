"""The optimizer settings that users write: AdamW, its learning-rate schedule, and what a NaN does. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.errors import UserError
from headrace.spec import parse, read_yaml
from headrace.user_document import naming

# Peak rates for AdamW with a warm-up of a few steps, by model. 7b to 9b are those of Llama 2 7B and Llama 3 8B, 70b that of
# Llama 3 70B, 1b and 3b lie a little above 7b. tiny and small are our own: the largest rates at which the loss falls smoothly
# from random weights on a few dozen short samples.
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

_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSpec(BaseModel):
    """Settings of AdamW (Loshchilov and Hutter 2019), its learning rate by step, and what happens when a step is not finite.

    Users write them as the section `optimizer:` of a topology file, a nodes file, or a file of its own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    learning_rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Peak learning rate. None: the model's entry in PEAK_LEARNING_RATES, which is meant for weights that start afresh."""
    warmup_steps: int = Field(default=3, ge=0)
    """Steps of linear warm-up. Step 0 already learns: its rate is the peak divided by `warmup_steps` + 1."""
    decay: Literal["constant", "cosine", "linear"] = "constant"
    """Shape of the learning rate after the warm-up: it falls from the peak to `floor` at step `decay_steps` and stays there."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Step at which the decay ends, counted from the job's first step, warm-up included, so that a resumed job keeps its rate."""
    floor: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate after the decay, as a fraction of the peak."""
    weight_decay: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Weight decay of matrices; biases and norm weights do not decay."""
    decay_embeddings: bool | None = None
    """Whether embedding tables decay too, including one tied to the output head. None: only if all weights start afresh."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    """AdamW's betas; the default is Llama 2's (Touvron et al. 2023, section 2.2)."""
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient clipping: the largest L2 norm of the whole model's gradient; larger ones are scaled down. `.inf`: no clipping."""
    on_nan: Literal["stop", "skip"] = "stop"
    """What happens when the loss or the gradient norm is NaN or infinite: 'stop' ends training before the step is committed;
    'skip' commits the step, so that its samples count as consumed, but leaves weights and moments as they are."""
    max_skips_in_row: int = Field(default=3, ge=1)
    """Consecutive steps that 'skip' may skip; one more step that is not finite ends training."""
    max_skips: int = Field(default=100, ge=1)
    """Total number of steps that 'skip' may skip in a run. A resumed run counts from 0 again."""

    check_replicas_every: int = Field(default=100, ge=0)
    """Steps from one comparison of the replicas' weights to the next; 0: they are compared before the first step only. Where they
    differ, as after a fault of a memory or a device, training ends."""

    @model_validator(mode="after")
    def _decays_somewhere(self) -> Self:
        if (self.decay == "constant") != (self.decay_steps is None):
            raise ValueError(
                "decay_steps says where 'cosine' or 'linear' end: "
                + ("set decay to one of them" if self.decay == "constant" else f"decay {self.decay!r} needs it")
            )
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(f"decay_steps must be above warmup_steps {self.warmup_steps}, got {self.decay_steps}: raise it")
        return self

    def resolved(self, model_name: str, pretrained: Collection[Path | str] = ()) -> Self:
        """Return a copy with `learning_rate` and `decay_embeddings` filled in for a model of PEAK_LEARNING_RATES.

        `pretrained`: folders that the model takes its initial weights from, or what else. Raises UserError where there are any
        and no learning rate is given.
        """
        fresh = PEAK_LEARNING_RATES[model_name]
        if pretrained and self.learning_rate is None:
            raise UserError(
                f"the weights in {', '.join(map(str, pretrained))} are pretrained, and the learning rate {fresh:g} of a fresh "
                f"model {model_name!r} would destroy them: set optimizer.learning_rate in the topology, to 1.0e-5 for example"
            )
        return self.model_copy(
            update={
                "learning_rate": self.learning_rate or fresh,
                "decay_embeddings": not pretrained if self.decay_embeddings is None else self.decay_embeddings,
            }
        )

    def checks_replicas(self, step: int) -> bool:
        """Return whether the replicas' weights are compared after a step, counted from 0."""
        return self.check_replicas_every > 0 and (step + 1) % self.check_replicas_every == 0

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0. `learning_rate` must be set, by the user or by `resolved`."""
        assert self.learning_rate is not None, "resolved before"
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / (self.warmup_steps + 1)
        if self.decay_steps is None:
            return self.learning_rate
        progress = min(1.0, (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps))
        left = 0.5 * (1 + math.cos(math.pi * progress)) if self.decay == "cosine" else 1 - progress
        return self.learning_rate * (self.floor + (1 - self.floor) * left)


class _OptimizerFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    optimizer: OptimizerSpec


def load_optimizer_yaml(path: Path) -> OptimizerSpec:
    """Read the section `optimizer:` of a YAML file that has no other. Raises SpecError."""
    document = read_yaml(path, "optimizer file")
    with naming(path):
        return parse(_OptimizerFile, document, "optimizer file").optimizer
