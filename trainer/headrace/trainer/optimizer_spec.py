"""How weights follow their gradients, as users write it down. It knows neither torch nor processes."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.errors import UserError
from headrace.spec import parse, read_yaml

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

_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSpec(BaseModel):
    """AdamW (Loshchilov and Hutter 2019), its rate as a function of the step, and what becomes of a step that is no number.

    The section `optimizer:` of a topology, of nodes, or of a file of its own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    learning_rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """At its peak. None: PEAK_LEARNING_RATES of the model, which are for weights that start afresh."""
    warmup_steps: int = Field(default=3, ge=0)
    """Over which the rate rises evenly to its peak. Step 0 already learns: its rate is the peak over `warmup_steps` + 1."""
    decay: Literal["constant", "cosine", "linear"] = "constant"
    """How the rate falls from its peak, behind the warm-up, to `floor` at step `decay_steps`, where it stays."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Counted from the job's first step, warm-up included, so that a resumed job goes on where it was."""
    floor: float = Field(default=0.1, ge=0, le=1)
    """As a share of the peak."""
    weight_decay: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Of matrices; biases and norms do not decay."""
    decay_embeddings: bool | None = None
    """Whether tables of embeddings decay too, also one that is the head as well. None: where all weights start afresh."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    """Llama 2's (Touvron et al. 2023, section 2.2)."""
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    max_grad_norm: float = Field(default=1.0, gt=0)
    """L2 norm of the whole model's gradient, to which a larger one is scaled down. `.inf`: never."""
    on_nan: Literal["stop", "skip"] = "stop"
    """Where loss or gradient norm is NaN or infinite: 'stop' ends training before the step is committed; 'skip' commits it, its
    samples count as consumed, and leaves weights and moments as they are."""
    max_skips_in_row: int = Field(default=3, ge=1)
    """Steps one behind the other that 'skip' may skip; the next one that is no number ends training."""
    max_skips: int = Field(default=100, ge=1)
    """Steps of a run that 'skip' may skip. A resumed run counts from 0 again."""

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

    def settled(self, model_name: str, pretrained: Collection[Path] = ()) -> Self:
        """With a learning rate, and with a word on embeddings. pretrained: folders whose weights the model begins with.

        Raises UserError for such weights where no rate is given.
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

    def rate(self, step: int) -> float:
        """Of a step, counted from 0. A rate is given, or settled."""
        assert self.learning_rate is not None, "settled before"
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
    """The section `optimizer:` of a YAML file with nothing else. Raises SpecError."""
    return parse(_OptimizerFile, read_yaml(path, "optimizer file"), "optimizer file").optimizer
