"""`python -m benchmarks.orchmllm.timed_rank ENDPOINT JOB FILE`: one FSDP rank that trains a job and times its steps' phases.

It is `headrace train --fsdp` but for a clock, that of the thread that computes: it stands still while the thread waits for other
ranks, or for a core. FILE gets, as JSON, the seconds of each phase of each microbatch, and the bytes exchanged.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from headrace.observability.logs import configure_logging
from headrace.trainer.models.loss import StepLoss
from headrace.trainer.orchestrated import fsdp_training
from headrace.trainer.orchestrated.orchestrated_loader import OrchestratedMicrobatch
from headrace.trainer.orchestrated.orchestrated_model import OrchestratedModel


class TimedModel(OrchestratedModel):
    """A model that knows how long each phase took: forward and backward of every unit, in the order in which ranks meet."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.microbatches: list[dict[str, float]] = []
        made.append(self)

    def accumulate(self, microbatch: OrchestratedMicrobatch) -> None:
        self.microbatches.append({})
        self._phase, self._since_s = "", time.thread_time()
        super().accumulate(microbatch)
        self._begin_phase("")

    def _encode(self, unit: str, microbatch: OrchestratedMicrobatch) -> Any:
        self._begin_phase(f"{unit} forward")
        sent = super()._encode(unit, microbatch)
        if sent.rows.requires_grad:

            def at_its_backward(_: Tensor) -> None:
                self._begin_phase(f"{unit} backward")

            sent.rows.register_hook(at_its_backward)  # type: ignore[no-untyped-call]
        return sent

    def _loss(self, microbatch: OrchestratedMicrobatch, arrived: Any) -> StepLoss:
        self._begin_phase("llm forward")
        loss = super()._loss(microbatch, arrived)
        self._begin_phase("llm backward")
        return loss

    def _begin_phase(self, name: str) -> None:
        now_s = time.thread_time()
        if self._phase:
            self.microbatches[-1][self._phase] = now_s - self._since_s
        self._phase, self._since_s = name, now_s


made: list[TimedModel] = []
"""The models of this process: one."""


def main() -> None:
    """Train to the job's end, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("endpoint")
    parser.add_argument("job")
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    configure_logging("trainer", "text")
    setattr(fsdp_training, OrchestratedModel.__name__, TimedModel)  # of which `train_fsdp` makes one
    fsdp_training.train_fsdp(options.endpoint, job=options.job, threads=1)
    [model] = made
    measured = {"microbatches": model.microbatches, "sent": model.exchanged.sent, "planned": model.exchanged.planned}
    options.file.write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    main()
