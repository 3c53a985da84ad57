"""How long a checkpoint of a stage stops training, how fast it gets to the host and to disk, and whether it comes back equal."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu.stage_alone import StageAlone, process_group, stage_alone
from benchmarks.gpu.target import Target
from benchmarks.report import Row, at_most
from headrace.trainer.pipeline.checkpoint import CheckpointWriter, load
from headrace.trainer.pipeline.checkpoint_files import Checkpoint, complete_steps

LAYERS, VOCAB = 3, 1024
"""Three layers of Qwen2-7B: 8.4 GB of weights and optimizer state."""
_LEAST_FREE_BYTES = 30e9
_WRITTEN_S = 40.0


def measure(target: Target) -> Iterator[Row]:
    """Yield seconds that `save` takes, the first time and later, bytes a second, and tensors that differ after a load."""
    with process_group(target.device), tempfile.TemporaryDirectory(prefix="headrace-gpu-") as name:
        folder = Path(name)
        layers = LAYERS if shutil.disk_usage(folder).free > _LEAST_FREE_BYTES else 1
        alone = _alone(target, layers)
        alone.run()
        with CheckpointWriter(folder, alone.step) as writer:
            first_s = _seconds(lambda: writer.save(1, {}), target)
            written_s = _until_complete(folder, 1)
            num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            size = f"{num_bytes / 1e9:.3g} GB"
            yield Row(name="stall of the first one, which allocates memory for it", value=first_s, unit="s", detail=size)
            alone.run()
            later_s = _seconds(lambda: writer.save(2, {}), target)
            yield Row(name="stall of a later one", value=later_s, unit="s", detail=size)
            yield Row(name="copy to the host, of a later one", value=num_bytes / later_s / 1e9, unit="GB/s")
            yield Row(name="to disk, beside training", value=num_bytes / written_s / 1e9, unit="GB/s")
        weights = [p.detach().cpu() for p in alone.model.parameters()]
        del alone
        again = _alone(target, layers)
        load(Checkpoint.newest(folder), again.step)
        loaded = [p.detach().cpu() for p in again.model.parameters()]
        differing = sum(not torch.equal(one, other) for one, other in zip(weights, loaded, strict=True))
        yield Row(name="parameters that a resumed stage has otherwise", value=differing, unit="tensors", goal=at_most(0))


def _alone(target: Target, layers: int) -> StageAlone:
    shape = replace(target.llm_shape, layers=min(layers, target.llm_shape.layers))
    return stage_alone(shape, [[64]], vocab_size=VOCAB, device=target.device, dtype=torch.bfloat16)


def _seconds(run: Callable[[], object], target: Target) -> float:
    target.synchronize()
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


def _until_complete(folder: Path, step: int) -> float:
    """Wait for a checkpoint to be on disk, and return the seconds. Raises TimeoutError where it takes too long."""
    began_s = time.perf_counter()
    while step not in complete_steps(folder):
        if time.perf_counter() - began_s > _WRITTEN_S:
            raise TimeoutError(f"the checkpoint is not on disk after {_WRITTEN_S:g} s: is it a slow one?")
        time.sleep(0.01)  # polls what another thread writes
    return time.perf_counter() - began_s
