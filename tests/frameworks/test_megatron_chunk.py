"""Megatron-Core's layers behind the `Chunk` seam: a pipeline of them is one process with all of them.

`make test-integrations` runs it, in an environment that has Megatron-Core.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from headrace.plan import Microbatch, StepPlan, Topology
from headrace.sample import UNIT_COLUMNS
from headrace.spec import parse
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.pipeline.executor import Executor
from headrace.trainer.pipeline.process_groups import ProcessGroups
from headrace.trainer.pipeline.routes import Portion, Routes
from headrace.trainer.pipeline.send_receive import Wire
from headrace.trainer.pipeline.topology import PipelineTopology
from headrace.trainer.pipeline.zero1 import ShardedAdamW
from tests.verify.batches import VOCAB, make_row, packed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "integrations" / "megatron_chunk.py"
SAMPLES = [((3, 5), (8, 9)), ((4, 7), (11,))]
"""By replica and microbatch."""
CPU = torch.device("cpu")
UNITS = {"pp": 2, "dp": 2}


def test_a_pipeline_of_megatrons_layers_is_one_process(tmp_path: Path) -> None:
    ((_, expected),) = _in_processes(tmp_path / "whole", {})
    parts = _in_processes(tmp_path / "parts", UNITS)
    assert len(parts) == 4
    assert len(expected["gradients"]) > 4 * 6
    found: dict[str, np.ndarray] = {}
    for rank, answer in parts:
        assert answer["loss"] == pytest.approx(expected["loss"], rel=1e-5), rank
        assert answer["target_weight"] == expected["target_weight"] > 0
        for name, gradient in answer["gradients"].items():
            found[name] = found.get(name, 0) + gradient
    assert found.keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        assert np.abs(found[name] - gradient).max() <= 1e-5 * np.abs(gradient).max(), name


def _in_processes(folder: Path, size: dict[str, int]) -> list[tuple[int, dict[str, Any]]]:
    """Loss, targets and own share of the gradients of each process."""
    folder.mkdir()
    count = size.get("pp", 1) * size.get("dp", 1)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(count)]
    processes = [
        context.Process(target=_run, args=(rank, str(folder / "store"), size, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        return [(rank, ours.recv()) for rank, (ours, _) in enumerate(pipes) if ours.poll(300)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run(rank: int, store: str, size: dict[str, int], answer: Connection) -> None:
    torch.set_num_threads(1)
    topology = parse(PipelineTopology, {"units": {"llm": size}}, "topology")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=topology.world_size)
    example = _example()
    groups = ProcessGroups.make(topology, CPU, tied=False)
    place = topology.place(rank)
    chunk = example.chunk_at(place, topology, VOCAB, CPU)
    if not size:
        answer.send(_alone(chunk))
        return
    names = {parameter: name for name, parameter in chunk.named_parameters()}
    optimizer = ShardedAdamW([[*chunk.parameters()]], groups.of_place[place].replicas)
    executor = Executor(topology, place, [chunk], Wire(groups.channels, CPU, torch.float32), backwards=optimizer)
    routes = _routes(topology)
    loss, target_weight = example.mean_gradients(executor, optimizer, groups, routes, executor.prepare.feed(routes, _text_of))
    gradients: dict[str, np.ndarray] = {}
    for piece in optimizer.pieces:
        share = torch.zeros(piece.parameter.numel())
        share[piece.begin : piece.begin + piece.weight.numel()] = piece.weight.grad
        gradients[names[piece.parameter]] = share.numpy()
    answer.send({"loss": loss, "target_weight": target_weight, "gradients": gradients})
    dist.barrier()


def _alone(chunk: Any) -> dict[str, Any]:
    """The same of all samples as one microbatch, by nothing but the chunk and autograd."""
    inputs = chunk.prepare(_texts([sample for replica in SAMPLES for samples in replica for sample in samples]))
    loss = chunk(inputs, None, {}).loss
    (loss.loss_sum / loss.target_weight).backward()
    gradients = {name: parameter.grad.flatten().numpy() for name, parameter in chunk.named_parameters()}
    return {"loss": float(loss.loss_sum) / loss.target_weight, "target_weight": loss.target_weight, "gradients": gradients}


def _routes(topology: PipelineTopology) -> Routes:
    replicas = [[Microbatch(units={"llm": samples}) for samples in microbatches] for microbatches in SAMPLES]
    shape = Topology(replicas=len(SAMPLES), microbatches=len(SAMPLES[0]), stages={"llm": topology.units["llm"].pp})
    return Routes(StepPlan(strategy="by hand", seed=0, topology=shape, replicas=replicas), topology.replicas)


def _text_of(portion: Portion) -> PackedMicrobatch:
    return _texts(portion.samples)


def _texts(samples: Sequence[int]) -> PackedMicrobatch:
    return packed([make_row(sample, audio=False) for sample in samples], UNIT_COLUMNS["llm"])


def _example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("megatron_chunk", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
