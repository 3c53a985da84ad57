"""Where the host waits for the device in a step: it then gives it no work ahead, and the device soon has none.

torch warns of what waits (`torch.cuda.set_sync_debug_mode`), but not of torch.distributed. Copies from memory that is not pinned
wait too, without a warning, and are counted from the profiler's record.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.isolated_check import skipped
from benchmarks.gpu.stage_alone import process_group, stage_alone
from benchmarks.gpu.target import Target
from benchmarks.report import Row, at_most
from headrace.model_shape import TransformerShape
from headrace.trainer.models.multimodal import initialise
from headrace.trainer.train_step import TrainStep, make_optimizer
from tests.verify.batches import SHAPE, make_row, packed, whole_model

STAGE = TransformerShape(layers=4, width=256, heads=4, kv_heads=2, mlp=512, gated=True)
VOCAB, LENGTHS = 1024, ((5, 200, 40), (17, 17), (1, 90, 3))
LISTED = {
    "pipeline/pipeline_step.py:PipelineStep._sum": "loss and number of targets of the global batch",
    "pipeline/pipeline_step.py:PipelineStep._reduce": "norm of the gradient",
    "pipeline/zero1.py:_any_of": "which replicas have a gradient",
    "train_step.py:TrainStep._reduce": "loss of the global batch",
    "train_step.py:TrainStep.finish": "norm of the gradient",
}
"""Places where the host may wait, all of them once a step, behind the last backward."""
_WAITS = "called a synchronizing"  # begins torch's warning of a wait; it has others, such as that this mode is a prototype


def measure(target: Target) -> Iterator[Row]:
    """Yield the number of waits outside of LISTED in a step of a pipeline stage, and of a colocated rank with every unit."""
    if not target.is_gpu:
        yield skipped("a step", "a CPU never waits for itself; the unit tests look for what would wait for a GPU")
        return
    with process_group(target.device):
        alone = stage_alone(STAGE, LENGTHS, vocab_size=VOCAB, device=target.device, dtype=torch.bfloat16)
        yield from _rows("a pipeline's stage, 3 microbatches", alone.run)
    yield from _rows("a colocated rank with encoders, 2 microbatches", _colocated(target.device))


def _rows(name: str, run: Callable[[], object]) -> Iterator[Row]:
    run()  # makes what is made once
    torch.cuda.synchronize()
    found: Counter[str] = Counter()
    with _warned_of(found):
        run()
    unlisted = {place: count for place, count in found.items() if place not in LISTED}
    yield Row(
        name=f"unlisted waits, {name}",
        value=sum(unlisted.values()),
        unit="a step",
        goal=at_most(0),
        detail=_counts(unlisted) or f"listed: {_counts(found) or 'none'}",
    )
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    copies = sum("HtoD" in event.name and "Pageable" in event.name for event in recorded.events() or ())
    yield Row(name=f"copies to the device from memory that is not pinned, {name}", value=copies, unit="a step", goal=at_most(0))


@contextmanager
def _warned_of(found: Counter[str]) -> Iterator[None]:
    """Count what torch warns of, by the innermost function of the trainer; what runs in autograd's own thread has none."""

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if _WAITS in str(message):
            found[place_of(sys._getframe(1))] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def place_of(frame: FrameType | None) -> str:
    """Return the innermost function of the trainer, with its file."""
    while frame is not None:
        _, found, path = frame.f_code.co_filename.rpartition("/headrace/trainer/")
        if found:
            return f"{path}:{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "outside of the trainer"


def _counts(found: dict[str, int]) -> str:
    return ", ".join(f"{place} {count}" for place, count in sorted(found.items()))


def _colocated(device: torch.device) -> Callable[[], object]:
    model = whole_model(SHAPE).to_empty(device=device)
    initialise(model, 0)
    step = TrainStep(model, make_optimizer(model.parameters()), dtype=torch.bfloat16)
    batch = [packed([make_row(sample, audio=True) for sample in samples]) for samples in (range(6), range(6, 12))]

    def run() -> None:
        for microbatch in batch:
            step.accumulate(microbatch)
        step.finish(1e-4)

    return run
