"""What an executor runs: a chunk of a stage, with its inputs and its output for one portion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.models.loss import StepLoss


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """What a chunk takes of a portion: its data, and what follows from them, such as indices of rows.

    All of it is made on the host, beside the step, and brought to the device at once: a computation that looked for rows on the
    device would wait for everything given to the device before.
    """

    num_rows: int
    """Number of rows of the portion's hidden states; 0 if the unit has nothing to do for the portion."""
    entry: Any = None
    """For the modules in front of the unit's first layer; None where the chunk has none of them."""
    layers: Any = None
    """For every layer."""
    dropout_keys: Tensor | None = None
    """(num_rows,) int64: what dropout draws by; None where the unit has none."""
    end: Any = None
    """For the modules behind the unit's last layer; None where the chunk has none of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """The output of a stage for one portion, connected to the stage's inputs by autograd."""

    rows: Tensor | None = None
    """Hidden states for the next stage, or on a unit's last stage tokens for the downstream unit; None if nothing follows."""
    loss: StepLoss | None = None
    """Loss of the portion on the last stage of the LLM and of the generator; None on all other stages."""


class Chunk(Protocol):
    """Protocol of one chunk of a stage in an executor: a `headrace.trainer.pipeline.stage.Stage`, or an emulated one."""

    @property
    def device(self) -> torch.device: ...
    @property
    def width(self) -> int: ...
    @property
    def token_width(self) -> int: ...
    def prepare(self, data: PackedMicrobatch) -> Inputs:
        """Return the chunk's inputs, on the host, from a portion's columns of this unit. Called from any thread."""

    def rows_between_stages(self, num_rows: int) -> int: ...
    def gather_slices(self, share: Tensor) -> Tensor:
        """Return the rows (n S, width) of all n slices of the stage behind each other, from this one's (S, width)."""

    def token_counts(self, data: PackedMicrobatch) -> Tensor: ...
    def input_token_counts(self, unit: str, data: PackedMicrobatch) -> Tensor: ...
    def __call__(self, inputs: Inputs, hidden: Tensor | None, arrived: Mapping[str, Tensor]) -> Output: ...
    def take_weight_gradients(self) -> Callable[[], None]:
        """Return a function that computes the weight gradients that the last backward put off; only under `zero-bubble`."""
