"""What people are told of a job's course."""

from __future__ import annotations

import math
from dataclasses import dataclass

from reorder_service.state import StepRecord


@dataclass(slots=True)
class Progress:
    """Sums over the committed steps. Losses are NaN until a step reports one; times in seconds."""

    first_loss: float = math.nan
    last_loss: float = math.nan
    step_s: float = 0.0
    data_wait_s: float = 0.0

    def add(self, record: StepRecord) -> None:
        """Count one more step."""
        if not math.isnan(record.loss):
            self.first_loss = record.loss if math.isnan(self.first_loss) else self.first_loss
            self.last_loss = record.loss
        self.step_s += record.step_s
        self.data_wait_s += record.data_wait_s
