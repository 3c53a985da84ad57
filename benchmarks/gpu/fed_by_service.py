"""Layers of a 7B LLM trained on real data: text from a local reorder service and preprocessors, packed and copied ahead."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.idle_share import idle_percent
from benchmarks.gpu.stage_speed import IDLE_GOAL_PERCENT, MFU_GOAL, PROFILED_STEPS, matrix_flops_per_s, model_flops, peak_of
from benchmarks.gpu.target import Target
from benchmarks.preprocess.services import services
from benchmarks.report import Row, at_least, at_most
from headrace.model_shape import MODEL_SHAPES, ModelShape
from headrace.spec import JobSpec, parse_spec
from headrace.trainer import StepLoader, connect
from headrace.trainer.models.multimodal import MultimodalModel, initialise
from headrace.trainer.train_step import TrainStep, make_optimizer

SAMPLES, TINY_SAMPLES = 4096, 64
MEAN_CHARACTERS, TINY_MEAN_CHARACTERS = 4000, 60
GLOBAL_BATCH, MICROBATCHES, TINY_BATCH = 64, 8, 4
WARM_UP, STEPS = 2, 4
LEARNING_RATE = 1e-4
WAIT_GOAL_PERCENT = 1.0
_WORDS = ("water", "wheel", "channel", "stone", "flour", "river", "gate", "even", "stream", "the", "of", "and", "a", "under")


def measure(target: Target) -> Iterator[Row]:
    """Yield the rate, the wait for data and the idle share of steps as a colocated rank runs them (`headrace train`)."""
    peak, _ = peak_of(target, 1.0 if target.peak_flops_per_s else matrix_flops_per_s(target))
    preprocessors = [("--threads", "2")] * (4 if target.is_gpu else 1)
    with tempfile.TemporaryDirectory(prefix="headrace-gpu-") as folder, services(preprocessors) as running:
        _write_text(Path(folder) / "text.jsonl", target)
        with connect(running.endpoint, job=running.submit(_spec(Path(folder), target))) as loader:
            training = _Training(target, loader)
            training.run(WARM_UP)
            training.reset()
            target.synchronize()
            began_s = time.perf_counter()
            training.run(STEPS)
            target.synchronize()
            seconds, num_tokens = time.perf_counter() - began_s, sum(training.lengths)
            flops = model_flops(training.num_weights, training.lengths, target.llm_shape)
            yield Row(
                name="MFU with real data",
                value=flops / seconds / peak,
                unit="of the peak",
                goal=target.goal(at_least(MFU_GOAL)),
                detail=f"{1e3 * seconds / STEPS:.0f} ms a step of {num_tokens / STEPS:,.0f} tokens",
            )
            wait = 100 * training.waits_s / seconds
            yield Row(name="wait for data", value=wait, unit="% of a step", goal=target.goal(at_most(WAIT_GOAL_PERCENT)))
            share = idle_percent(lambda: training.run(PROFILED_STEPS), target)
            goal = target.goal(at_most(IDLE_GOAL_PERCENT))
            yield Row(name="idle share of the device with real data", value=share, unit="%", goal=goal)


class _Training:
    """A training loop, and what it was given since the last `reset`."""

    def __init__(self, target: Target, loader: StepLoader) -> None:
        shape, tiny = target.llm_shape, MODEL_SHAPES["tiny"]
        with torch.device("meta"):
            model = MultimodalModel(
                ModelShape(vision=tiny.vision, audio=tiny.audio, llm=shape),
                vocab_size=loader.vocabulary.size,
                image=loader.spec.image,
                audio=loader.spec.audio,
                image_token_id=loader.vocabulary.image_token,
                audio_token_id=loader.vocabulary.audio_token,
            )
        model.to_empty(device=target.device)
        initialise(model, 0)
        self._step = TrainStep(model, make_optimizer(model.parameters()), dtype=torch.bfloat16)
        self._loader, self._steps = loader, iter(loader)
        self.num_weights = shape.layers * shape.layer_weights + shape.width * loader.vocabulary.size
        self.reset()

    def reset(self) -> None:
        self.waits_s = 0.0
        self.lengths: list[int] = []

    def run(self, num_steps: int) -> None:
        """Train on so many steps, and commit them."""
        for step in islice(self._steps, num_steps):
            for microbatch in step:
                self.lengths += microbatch.data.cu_seqlens.diff().tolist()
                self._step.accumulate(microbatch.data)
            result = self._step.finish(LEARNING_RATE)
            self._loader.commit(step, loss=result.recorded_loss)
            self.waits_s += step.data_wait_s


def _spec(folder: Path, target: Target) -> JobSpec:
    return parse_spec(
        {
            "name": "gpu-fed",
            "sources": [{"path": str(folder), "name": "text"}],
            "global_batch": GLOBAL_BATCH if target.is_gpu else TINY_BATCH,
            "epochs": 1000,
            "topology": {"replicas": 1, "microbatches": MICROBATCHES if target.is_gpu else 2, "stages": {"encoder": 1, "llm": 1}},
        }
    )


def _write_text(path: Path, target: Target) -> None:
    """Write documents whose lengths vary as those of the web do, with a few very long ones."""
    rng = np.random.default_rng(0)
    mean = MEAN_CHARACTERS if target.is_gpu else TINY_MEAN_CHARACTERS
    lengths = np.minimum(rng.lognormal(np.log(mean), 0.8, SAMPLES if target.is_gpu else TINY_SAMPLES), 4 * mean).astype(int)
    with path.open("w", encoding="utf-8") as file:
        for length in lengths:
            file.write(json.dumps({"text": " ".join(rng.choice(_WORDS, max(2, length // 6)))}) + "\n")
