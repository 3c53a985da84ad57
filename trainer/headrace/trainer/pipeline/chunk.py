"""What an executor runs: a chunk of a stage, and its output for one portion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.models.loss import StepLoss


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
    def num_rows(self, data: PackedMicrobatch) -> int: ...
    def token_counts(self, data: PackedMicrobatch) -> Tensor: ...
    def input_token_counts(self, unit: str, data: PackedMicrobatch) -> Tensor: ...
    def __call__(self, data: PackedMicrobatch, hidden: Tensor | None, arrived: Mapping[str, Tensor]) -> Output: ...
    def take_weight_gradients(self) -> Callable[[], None]:
        """Return a function that computes the weight gradients that the last backward put off; only under `zero-bubble`."""
