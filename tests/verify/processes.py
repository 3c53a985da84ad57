"""Processes with a gloo group among them, which run one case after the other."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from headrace.plan import StepPlan
from headrace.spec import parse
from tests.verify.batches import AUDIO, IMAGE, SHAPE, VOCAB, enlarge, make_row, packed, whole_model
from trainer.pipeline.groups import ProcessGroups
from trainer.pipeline.partition import bounds
from trainer.pipeline.routes import Portion
from trainer.pipeline.stages import Stage, build_stages
from trainer.pipeline.step import PipelineStep
from trainer.pipeline.topology import PipelineTopology
from trainer.step import StepResult

TIMEOUT_S = 60.0  # of a case
SEED = 1


@dataclass(frozen=True, slots=True)
class Order:
    """A case as a process gets it: no tensors, no functions."""

    topology: dict[str, Any]
    plans: Sequence[dict[str, Any]]
    """One StepPlan for every step, as JSON."""
    audio: bool
    learning_rate: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What a process computed."""

    results: list[StepResult]
    gradients: dict[str, np.ndarray]
    """Of the first step, by parameter."""
    weights: dict[str, np.ndarray]
    """After the last one."""


class Processes:
    """As many as the largest case needs; those that a case has no place for only join in making its groups."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-verify-")
        store = str(Path(self._folder.name) / "store")
        pairs = [context.Pipe() for _ in range(count)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            context.Process(target=_serve, args=(rank, count, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()

    def run(self, order: Order) -> list[Answer]:
        """Of the ranks that the topology has. Raises RuntimeError with the first traceback, or where a case hangs."""
        for pipe in self._pipes:
            pipe.send(order)
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TIMEOUT_S):
                raise RuntimeError(f"rank {rank} does not answer within {TIMEOUT_S:g} s")
            answer = pipe.recv()
            if isinstance(answer, str):
                raise RuntimeError(f"rank {rank}: {answer}")
            answers.append(answer)
        return [answer for answer in answers if answer is not None]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(rank: int, count: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    while True:
        order = pipe.recv()
        try:
            pipe.send(_run(rank, order))
        except Exception:
            pipe.send(traceback.format_exc())


def _run(rank: int, order: Order) -> Answer | None:
    topology = parse(PipelineTopology, order.topology, "topology")
    groups = ProcessGroups.make(topology)
    if rank >= topology.world_size:
        return None
    stages = stages_of(topology, rank)
    step = PipelineStep(topology, stages, groups, max_grad_norm=1e9)
    parameters = {name: p for stage in stages for name, p in stage.model.named_parameters()}

    def feed(portion: Portion) -> Any:
        return packed([make_row(sample, audio=order.audio) for sample in portion.samples], portion.unit)

    results, gradients = [], {}
    for number, plan in enumerate(order.plans):
        if number == 0:
            results.append(step.accumulate(StepPlan.from_json(plan), feed))
            gradients = {name: p.grad.numpy().copy() for name, p in parameters.items() if p.grad is not None}
            step.discard()
        results.append(step.run(StepPlan.from_json(plan), feed, order.learning_rate))
    groups.close()
    return Answer(results, gradients, {name: p.detach().numpy().copy() for name, p in parameters.items()})


def stages_of(topology: PipelineTopology, rank: int) -> list[Stage]:
    """The stages of one process."""
    place = topology.place(rank)
    cuts = bounds(topology, SHAPE, vocab_size=VOCAB, image=IMAGE, audio=AUDIO)[place.unit]
    stages = build_stages(whole_model, topology, place, cuts, seed=SEED, device=torch.device("cpu"))
    enlarge(torch.nn.ModuleList(stages))
    return stages
