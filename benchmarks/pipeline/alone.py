"""A pipeline of one stage in one process, beside a plain PyTorch loop: the same model, the same batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from benchmarks.report import Row, Section, at_least
from benchmarks.timing import progress
from headrace.model_shape import MODEL_SHAPES
from headrace.plan import LLM, Microbatch, StepPlan, Topology
from headrace.sample import SCHEMA, UNIT_COLUMNS
from headrace.spec import AudioSpec, ImageSpec
from headrace.trainer.loading.collate import PackedMicrobatch, collate
from headrace.trainer.models.multimodal import MultimodalModel, initialise
from headrace.trainer.optimizer_spec import OptimizerSpec
from headrace.trainer.pipeline.layer_partition import bounds
from headrace.trainer.pipeline.pipeline_step import PipelineStep
from headrace.trainer.pipeline.process_groups import ProcessGroups
from headrace.trainer.pipeline.routes import Routes
from headrace.trainer.pipeline.stage_building import build_stages
from headrace.trainer.pipeline.topology import PipelineTopology, UnitTopology
from headrace.trainer.train_step import make_optimizer
from headrace.transport.malloc import keep_freed_pages

MODEL, VOCAB, SEED = "tiny", 4096, 0
MICROBATCHES, SAMPLES = 8, 8
MEAN_TOKENS = 96
LEARNING_RATE = 1e-3
ROUNDS, QUICK_ROUNDS = 15, 3
THROUGHPUT_GOAL = 0.95

Batch = dict[tuple[int, ...], PackedMicrobatch]
"""Microbatches by their samples."""


@dataclass(frozen=True, slots=True)
class _Step:
    loss: float
    seconds: float
    cpu_s: float


def section(*, quick: bool) -> Section:
    """One step of each by turns, now the one first and now the other."""
    progress("one process, one stage, beside a plain PyTorch loop")
    keep_freed_pages()  # else either of them pays, by chance, for fresh pages of memory: up to a tenth of a step
    batch = _batch()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        ours, plain = _pipeline(batch), _plain(batch)
        _round(ours, plain)  # warms up
        rounds = [_round(ours, plain, plain_first=number % 2 > 0) for number in range(QUICK_ROUNDS if quick else ROUNDS)]
    finally:
        dist.destroy_process_group()
    ratios = [theirs.seconds / own.seconds for own, theirs in rounds]
    of_cpu = median(theirs.cpu_s / own.cpu_s for own, theirs in rounds)
    apart = max(abs(own.loss / theirs.loss - 1) for own, theirs in rounds)
    step_s = median(own.seconds for own, _ in rounds)
    row = Row(
        name="throughput over that of the loop",
        value=median(ratios),
        unit="x",
        goal=at_least(THROUGHPUT_GOAL),
        detail=(
            f"{min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} rounds, by CPU time {of_cpu:.3f}; "
            f"a step {1e3 * step_s:.0f} ms; losses differ by {apart:.0e}"
        ),
    )
    what = f"model {MODEL!r}, {MICROBATCHES} microbatches of {SAMPLES} samples of text, {_num_tokens(batch):,} tokens a step"
    return Section(title=f"One process, one stage, beside a plain PyTorch loop: {what}", rows=[row])


def _round(ours: Callable[[], float], plain: Callable[[], float], *, plain_first: bool = False) -> tuple[_Step, _Step]:
    if plain_first:
        theirs = _timed(plain)
        return _timed(ours), theirs
    return _timed(ours), _timed(plain)


def _timed(step: Callable[[], float]) -> _Step:
    began_s, cpu_began_s = time.perf_counter(), time.process_time()
    loss = step()
    return _Step(loss, time.perf_counter() - began_s, time.process_time() - cpu_began_s)


def _pipeline(batch: Batch) -> Callable[[], float]:
    topology = PipelineTopology(units={LLM: UnitTopology()})
    shape, groups = MODEL_SHAPES[MODEL], ProcessGroups.make(topology, torch.device("cpu"), tied=True)
    cuts = bounds(topology, shape, vocab_size=VOCAB, image=ImageSpec(), audio=AudioSpec())[LLM]
    place = topology.place(0)
    stages = build_stages(_model, topology, place, cuts, seed=SEED, device=torch.device("cpu"), slices=None)
    step = PipelineStep(topology, {place: stages}, groups)
    planned = Topology(replicas=1, microbatches=MICROBATCHES, stages=topology.stages)
    plan = StepPlan(
        strategy="by hand", seed=0, topology=planned, replicas=[[Microbatch(units={LLM: samples}) for samples in batch]]
    )

    def run() -> float:
        routes = Routes(plan, topology.replicas)
        feed = step.places[0].prepare.feed(routes, lambda portion: batch[portion.samples])
        return step.run(routes, [feed], LEARNING_RATE).loss

    return run


def _plain(batch: Batch) -> Callable[[], float]:
    model = _model().to_empty(device="cpu")
    initialise(model, SEED)
    optimizer = make_optimizer(model.parameters(), OptimizerSpec(learning_rate=LEARNING_RATE))

    def step() -> float:
        loss_sum, target_weight = 0.0, 0.0
        for microbatch in batch.values():
            loss = model(microbatch)
            loss.loss_sum.backward()
            loss_sum += float(loss.loss_sum.detach())
            target_weight += loss.target_weight
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= target_weight
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss_sum / target_weight

    return step


def _model() -> MultimodalModel:
    """On the meta device."""
    with torch.device("meta"):
        return MultimodalModel(
            MODEL_SHAPES[MODEL], vocab_size=VOCAB, image=ImageSpec(), audio=AudioSpec(), image_token_id=1, audio_token_id=2
        )


def _batch() -> Batch:
    rng = np.random.default_rng(SEED)
    ids = np.arange(MICROBATCHES * SAMPLES).reshape(MICROBATCHES, SAMPLES).tolist()
    return {tuple(samples): _packed([_text(rng, sample) for sample in samples]) for samples in ids}


def _text(rng: np.random.Generator, sample: int) -> dict[str, object]:
    tokens = rng.integers(3, VOCAB, 2 + rng.poisson(rng.exponential(MEAN_TOKENS)), dtype=np.int32)
    row: dict[str, object] = {name: [] for name in SCHEMA.names}
    return row | {"sample_id": sample, "input_ids": tokens, "labels": tokens, "flags": 0}


def _packed(rows: Sequence[dict[str, object]]) -> PackedMicrobatch:
    return collate([pa.RecordBatch.from_pylist(list(rows), schema=SCHEMA).select(list(UNIT_COLUMNS[LLM]))])


def _num_tokens(batch: Batch) -> int:
    return sum(len(microbatch.input_ids) for microbatch in batch.values())
