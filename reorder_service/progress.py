"""What a committed step leaves behind, and what all of them together say of a job's course."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

Delivered = Mapping[str, tuple[int, int, int, int]]
"""Source -> its samples, and their tokens, image patches and mel frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A committed step. `samples`: names, sorted; times in seconds, of the slowest rank."""

    samples: tuple[str, ...]
    loss: float
    step_s: float
    data_wait_s: float
    delivered: Delivered = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Sums over the committed steps. Losses are NaN until a step reports one; times in seconds."""

    samples: int = 0
    first_loss: float = math.nan
    last_loss: float = math.nan
    step_s: float = 0.0
    data_wait_s: float = 0.0
    delivered: Delivered = field(default_factory=dict)

    def after(self, record: StepRecord) -> Progress:
        """With one more step."""
        sums = replace(
            self,
            samples=self.samples + len(record.samples),
            step_s=self.step_s + record.step_s,
            data_wait_s=self.data_wait_s + record.data_wait_s,
            delivered=added(self.delivered, record.delivered),
        )
        if math.isnan(record.loss):
            return sums
        first = record.loss if math.isnan(self.first_loss) else self.first_loss
        return replace(sums, first_loss=first, last_loss=record.loss)


def added(one: Delivered, other: Delivered) -> Delivered:
    """The sums, source by source."""
    zero = (0, 0, 0, 0)
    sums = {name: tuple(map(sum, zip(one.get(name, zero), other.get(name, zero), strict=True))) for name in {**one, **other}}
    return {name: (samples, tokens, patches, frames) for name, (samples, tokens, patches, frames) in sums.items()}
