"""Processes that are FSDP ranks, which run one case after the other."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from headrace.manifest import Vocabulary
from headrace.plan import LLM
from headrace.spec import JobSpec, parse_spec
from headrace.trainer.loading.stopwatch import Stopwatch
from headrace.trainer.models.fused_linear import Part
from headrace.trainer.orchestrated.fsdp_checkpoint import FsdpCheckpoints, load
from headrace.trainer.orchestrated.orchestrated_loader import microbatches
from headrace.trainer.orchestrated.orchestrated_model import OrchestratedModel
from headrace.trainer.orchestrated.unit_roots import StageRoot
from headrace.trainer.pipeline.cargo import Cargo, Prepare
from headrace.trainer.pipeline.checkpoint_files import Checkpoint
from headrace.trainer.pipeline.routes import Portion, Routes
from headrace.trainer.pipeline.stage_building import build_stages
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from headrace.trainer.train_step import StepResult, make_optimizer
from tests.verify.batches import AUDIO, AUDIO_TOKEN, IMAGE, IMAGE_TOKEN, VOCAB, enlarge, whole_model
from tests.verify.fsdp_cases import BLOCK, LEARNING_RATE, SEED, STEPS, FsdpCase, packed_rows
from tests.verify.processes import Processes

MOST_RANKS = 4
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class FsdpOrder:
    """A case as a process gets it, with where it begins and ends."""

    case: FsdpCase
    load_from: str = ""
    save_to: str = ""
    """Folders of checkpoints."""
    steps: tuple[int, ...] = tuple(range(STEPS))
    module: str = ""
    """A file whose `Vision` and `Llm` are the modules, in place of the compact model's; they have vision alone."""


@dataclass(frozen=True, slots=True)
class FsdpAnswer:
    """What a rank computed."""

    results: list[StepResult]
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    """Of the first step, whole; of the first rank alone, as are the weights."""
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    """After the last step."""
    sent_bytes: int = 0
    planned_bytes: int = 0


def fsdp_processes() -> Processes:
    return Processes(MOST_RANKS, serve)


def serve(rank: int, count: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}-fsdp", rank=rank, world_size=count)
    meshes: dict[tuple[int, int | None], DeviceMesh] = {}
    while True:
        number, order = pipe.recv()
        try:
            pipe.send((number, _run(rank, order, meshes)))
        except Exception:
            pipe.send((number, traceback.format_exc()))


def _run(rank: int, order: FsdpOrder, meshes: dict[tuple[int, int | None], DeviceMesh]) -> list[FsdpAnswer]:
    case = order.case
    key = case.ranks, case.shard_ranks
    if key not in meshes:  # all processes make it together
        shape = (case.ranks,) if case.shard_ranks is None else (case.ranks // case.shard_ranks, case.shard_ranks)
        names = ("shard",) if case.shard_ranks is None else ("replicate", "shard")
        meshes[key] = DeviceMesh("cpu", torch.arange(case.ranks).view(shape), mesh_dim_names=names)
    if rank >= case.ranks:
        return []
    topology = PipelineTopology.model_validate(case.topology)
    model = own_model(order.module, meshes[key]) if order.module else model_of(case, topology, meshes[key])
    optimizer = make_optimizer(model.sharded)
    for options in optimizer.param_groups:
        options["lr"] = LEARNING_RATE
    if order.load_from:
        load(Checkpoint.newest(Path(order.load_from)), model, optimizer)
    results, gradients = [], dict[str, np.ndarray]()
    for step in order.steps:
        routes = Routes(case.plan(step), topology.replicas)
        makers = zip(topology.units, model.prepare(topology, rank), strict=True)
        feeds = {unit: partial(_cargo, case, step, routes, prepare) for unit, prepare in makers}
        for microbatch in microbatches(routes, topology, rank, feeds, Stopwatch(on_gpu=False)):
            model.accumulate(microbatch)
        results.append(model.average(case.max_grad_norm))
        if step == order.steps[0]:
            gradients = {n: one for p, fused in model.sharded.items() if p.grad is not None for n, one in _wholes(p.grad, fused)}
        optimizer.step()
        model.discard()
    if order.save_to:
        saving = FsdpCheckpoints(Path(order.save_to), model, optimizer, goes_on=False)
        saving.save(order.steps[-1] + 1, {}, {})
    weights = {name: whole for p, fused in model.sharded.items() for name, whole in _wholes(p.detach(), fused)}
    count = model.exchanged
    tensors = (gradients, weights) if rank == 0 else ({}, {})
    return [FsdpAnswer(results, *tensors, sent_bytes=count.sent, planned_bytes=count.planned)]


def _cargo(case: FsdpCase, step: int, routes: Routes, prepare: Prepare, portion: Portion) -> Cargo:
    """As a feed makes it, of the samples that are not refused."""
    samples = tuple(sample for sample in portion.samples if sample not in case.refused_ids(step))
    return prepare(routes, portion, packed_rows(samples, case.encoders, portion.unit))


def model_of(case: FsdpCase, topology: PipelineTopology, mesh: DeviceMesh) -> OrchestratedModel:
    """The compact model's units."""
    roots = {}
    for unit in topology.units:
        make, layers = partial(whole_model, case.shape, dropout=case.dropout), case.shape.units[unit].layers
        place = Place(unit, mesh.get_rank(), 0, 0)
        [stage] = build_stages(make, topology, place, (0, layers), seed=SEED, device=CPU, slices=None)
        enlarge(stage)
        roots[unit] = StageRoot(stage, case.form)
    dtype = getattr(torch, case.dtype)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    llm = roots.pop(LLM)
    return OrchestratedModel(
        roots,
        llm,
        mesh=mesh,
        spec=spec_of(case.units, case.ranks, case.cp),
        vocabulary=VOCABULARY,
        mp_policy=policy if case.dtype != "float32" else None,
        dtype=dtype,
        block=BLOCK,
    )


VOCABULARY = Vocabulary(size=VOCAB, image_token=IMAGE_TOKEN, audio_token=AUDIO_TOKEN)


def spec_of(units: tuple[str, ...], ranks: int = 1, cp: int | str = 1) -> JobSpec:
    topology, shared = {"replicas": ranks, "stages": dict.fromkeys(units, 1)}, {"llm": {"cp": cp}}
    execution = {"trainer": "fsdp", "units": shared}
    document = {"name": "j", "sources": [{"path": "/d"}], "topology": topology, "execution": execution}
    return parse_spec(document).model_copy(update={"image": IMAGE, "audio": AUDIO})


def own_model(path: str, mesh: DeviceMesh) -> OrchestratedModel:
    """A user's modules, of the file `path`."""
    names: dict[str, Any] = {"__name__": "example"}
    exec(Path(path).read_text(), names)
    torch.manual_seed(SEED)
    spec = spec_of(("vision", LLM))
    encoders, llm = {"vision": names["Vision"](spec, 32)}, names["Llm"](VOCABULARY, 32)
    return OrchestratedModel(encoders, llm, mesh=mesh, spec=spec, vocabulary=VOCABULARY)


def _wholes(tensor: torch.Tensor, fused: Sequence[Part]) -> Iterator[tuple[str, np.ndarray]]:
    """A copy of all of each part of a parameter's tensor: a collective call."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return ((part.name, part.of(whole).float().clone().numpy()) for part in fused)
