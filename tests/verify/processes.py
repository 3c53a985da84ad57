"""Processes with a gloo group among them, which run one case after the other."""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo

from headrace.model_shape import ModelShape
from headrace.plan import GENERATOR, StepPlan
from headrace.spec import parse
from headrace.trainer.loading.packs import Padding, in_packs
from headrace.trainer.models.fused_linear import Part, parts_of
from headrace.trainer.models.multimodal import MultimodalModel
from headrace.trainer.optimizer_spec import OptimizerSpec
from headrace.trainer.pipeline.cargo import Cargo, Feed
from headrace.trainer.pipeline.channels import ChannelEnd, ChannelRanks, Channels, group_end
from headrace.trainer.pipeline.checkpoint import CheckpointWriter, load
from headrace.trainer.pipeline.checkpoint_files import Checkpoint
from headrace.trainer.pipeline.feed import columns_of
from headrace.trainer.pipeline.layer_partition import bounds, with_cuts
from headrace.trainer.pipeline.pipeline_step import PipelineStep
from headrace.trainer.pipeline.place_groups import context_groups, tensor_groups
from headrace.trainer.pipeline.place_step import PlaceStep
from headrace.trainer.pipeline.process_groups import ProcessGroups
from headrace.trainer.pipeline.routes import Portion, Routes
from headrace.trainer.pipeline.stage import Stage
from headrace.trainer.pipeline.stage_building import build_stages
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from headrace.trainer.train_step import StepResult
from tests.host_waits import watched
from tests.ordered_backend import ordered
from tests.verify.batches import AUDIO, GENERATING, IMAGE, SHAPE, VOCAB, enlarge, packed_samples, whole_model

TIMEOUT_S = 300.0  # of a case on a busy machine, the first one with the start of the processes
CASES_OF_A_GROUP = 40
"""After so many cases groups are made anew: each that lives on has threads of its own."""
SEED = 1
MAY_WAIT = {
    "pipeline/pipeline_step.py:PipelineStep._sum": "loss and number of targets of the global batch",
    "pipeline/zero1.py:_any_of": "which replicas have a gradient",
    "pipeline/pipeline_step.py:PipelineStep._reduce": "the norm of the gradient",
}
"""Places where the host may wait for a GPU once a step, and what it reads there: all behind the last action."""
CPU = torch.device("cpu")
TRANSPORTS: dict[str, Callable[[ChannelEnd], ChannelEnd]] = {"gloo": lambda end: end, "ordered": ordered}
"""What carries messages, and what makes it of a channel's end on gloo. `ordered` EMULATES NCCL, which keeps their order."""


@dataclass(frozen=True, slots=True)
class Order:
    """A case as a process gets it: no tensors, no functions."""

    topology: dict[str, Any]
    plans: Sequence[dict[str, Any]]
    """One StepPlan for every step, as JSON."""
    audio: bool
    learning_rate: float
    dtype: str = "float32"
    max_grad_norm: float = 1e9
    tied: bool = True
    """Whether the LLM's head is its embedding."""
    transport: str = "gloo"
    """One of TRANSPORTS."""
    is_first: bool = True
    """Whether this is the first transport that the case runs on: there the first step is also discarded and run again, and what
    would make the host wait for a GPU is looked for, since neither knows what carries messages."""
    load_from: str = ""
    """Folder of checkpoints, to begin with the newest."""
    save_to: str = ""
    """Folder for a checkpoint after the last step."""
    packs: dict[int, int] = field(default_factory=dict)
    """Sample -> number of its pack; empty: samples are not packed."""
    pack_tokens: int = 0
    """Length to which packs are padded."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a process computed in one of its places."""

    slice: int
    """Of its layers."""
    num_slices: int
    """Of its unit."""
    results: list[StepResult]
    gradients: dict[str, np.ndarray]
    """Of the first step, by parameter; this process's slice of each that is cut."""
    weights: dict[str, np.ndarray]
    """After the last one."""
    waits: dict[str, int]
    """How often the host would wait for a GPU in the steps after the first, in other places than MAY_WAIT, by place."""
    bytes_at_rest: int
    """Of all weights, between two steps."""
    moments: dict[str, np.ndarray]
    """Of the parameters that this process owns, after the last step: AdamW's first and second."""


class Processes:
    """As many as the largest case needs; those that a case has no place for only join in making its groups."""

    def __init__(self, count: int, serve: Callable[[int, int, str, Connection], None] | None = None) -> None:
        """`serve`: what each runs; None: the cases of pipelines."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.nursery.preloaded"])
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-verify-")
        store = str(Path(self._folder.name) / "store")
        pairs = [context.Pipe() for _ in range(count)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            context.Process(target=serve or _serve, args=(rank, count, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()
        self.num_orders = 0

    def run(self, order: Any) -> list[Any]:
        """The answers to an Order, of all places of the topology, or to what `serve` takes. Raises RuntimeError with all
        tracebacks, or where a case hangs."""
        number, deadline = self.num_orders, time.monotonic() + TIMEOUT_S
        self.num_orders += 1
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # of one that has died its answer tells
                pipe.send((number, order))
        answers = [_answer(rank, pipe, number, deadline) for rank, pipe in enumerate(self._pipes)]
        failures = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if isinstance(answer, str)]
        if failures:
            raise RuntimeError("\n".join(failures))
        return [of_place for answer in answers if not isinstance(answer, str) for of_place in answer]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the processes, whatever they do."""
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _answer(rank: int, pipe: Connection, number: int, deadline: float) -> list[Answer] | str:
    """To that order: answers to those before it, which nobody waited for to the end, are passed over."""
    while pipe.poll(max(0.0, deadline - time.monotonic())):
        try:
            answered, answer = pipe.recv()
        except EOFError:
            raise RuntimeError(f"rank {rank} has died, by a signal or for lack of memory") from None
        if answered == number:
            return answer  # type: ignore[no-any-return]
    raise RuntimeError(f"rank {rank} does not answer within {TIMEOUT_S:g} s")


def _use_one_loop() -> None:
    """Make known a gloo whose groups share the thread that moves their bytes: each one's wakes up a hundred times a second."""
    device = ProcessGroupGloo.create_device(hostname="127.0.0.1")

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout = [device], timeout
        return ProcessGroupGloo(store, rank, size, options)

    dist.Backend.register_backend("one_loop", make, devices=["cpu"])


def _serve(rank: int, count: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    _use_one_loop()
    while True:
        number, order = pipe.recv()
        if number % CASES_OF_A_GROUP == 0:
            if number:
                dist.destroy_process_group()
            made = _Made()
            dist.init_process_group("one_loop", init_method=f"file://{store}-{number}", rank=rank, world_size=count)
        try:
            pipe.send((number, _run(rank, order, made)))
        except Exception:
            pipe.send((number, traceback.format_exc()))


@dataclass(frozen=True, slots=True)
class _Made:
    """What lives on between cases for a while, as to make it takes longer than many a case."""

    groups: dict[tuple[Any, ...], ProcessGroups] = field(default_factory=dict)
    """By all that they are made from."""
    ends: dict[ChannelRanks, dict[str, ChannelEnd | None]] = field(default_factory=dict)
    """By what carries the channel, and by transport."""


def _groups(topology: PipelineTopology, order: Order, made: _Made) -> ProcessGroups:
    rank = dist.get_rank()

    def open_end(ranks: ChannelRanks) -> ChannelEnd | None:
        if ranks not in made.ends:
            end = group_end(ranks, rank, CPU)
            made.ends[ranks] = {name: end and make(end) for name, make in TRANSPORTS.items()}
        return made.ends[ranks][order.transport]

    # The same key on every process, as all of them make groups together.
    key = tuple(map(topology.places, range(topology.world_size))), tensor_groups(topology), context_groups(topology), order.tied
    if key not in made.groups:
        made.groups[key] = ProcessGroups.make(topology, CPU, tied=order.tied, open_end=open_end)
    return replace(made.groups[key], channels=Channels(topology, rank, CPU, open_end))


class _Observed(PipelineStep):
    """Keeps what the first step accumulates, when it does so for the first time."""

    first: tuple[StepResult, ...] = ()
    gradients: Sequence[dict[str, np.ndarray]] = ()
    """Of each place."""

    def accumulate(self, routes: Routes, feeds: Sequence[Feed]) -> StepResult:
        result = super().accumulate(routes, feeds)
        if not self.first:
            self.first, self.gradients = (result,), [_gradients(place) for place in self.places]
        return result


def _run(rank: int, order: Order, made: _Made) -> list[Answer]:
    topology = cut(parse(PipelineTopology, order.topology, "topology"))
    groups = _groups(topology, order, made)
    if rank >= topology.world_size:
        for plan in order.plans:  # as the others do in their steps: torch numbers groups by how many each process has made
            groups.channels.open_between(Routes(StepPlan.from_json(plan), topology.replicas).pairs)
        return []
    dtype = getattr(torch, order.dtype)
    stages = {place: stages_of(topology, place, groups, dtype, tied=order.tied) for place in topology.places(rank)}
    settings = OptimizerSpec(max_grad_norm=order.max_grad_norm)
    step = _Observed(topology, stages, groups, settings=settings, dtype=dtype)
    first_step = 0
    if order.load_from:
        checkpoint = Checkpoint.newest(Path(order.load_from))
        load(checkpoint, step)
        first_step = checkpoint.step

    def data_of(place: Place, portion: Portion) -> Any:
        data = packed_samples(portion.samples, audio=order.audio, columns=columns_of(topology, place))
        if not order.packs:
            return data
        packs = [list(pack) for _, pack in itertools.groupby(portion.samples, order.packs.__getitem__)]
        return in_packs(data, packs, Padding(pack_tokens=order.pack_tokens, segment_tokens=order.pack_tokens, token=0))

    results = []
    waits: Counter[str] = Counter()
    for number, plan in enumerate(order.plans):
        routes = Routes(StepPlan.from_json(plan), topology.replicas)
        feeds = [place.prepare.feed(routes, partial(data_of, place.place)) for place in step.places]
        if number == 0 and order.is_first:
            step.accumulate(routes, feeds)
            step.discard()
        # the first one makes what is made once
        watch = watched(waits, MAY_WAIT) if number and order.is_first else nullcontext()
        with ThreadPoolExecutor(1) as packing, watch:
            results.append(step.run(routes, [partial(_beside, packing, feed) for feed in feeds], order.learning_rate))
    if order.save_to:
        with CheckpointWriter(Path(order.save_to), step, goes_on=order.save_to == order.load_from) as writer:
            writer.save(first_step + len(order.plans), {})
    return [
        _answer_of(place, [*step.first, *results], of_place, waits if number == 0 else {})
        for number, (place, of_place) in enumerate(zip(step.places, step.gradients, strict=True))
    ]


def _answer_of(place: PlaceStep, results: list[StepResult], gradients: dict[str, np.ndarray], waits: Mapping[str, int]) -> Answer:
    place.optimizer.wait()
    parameters = _parameters(place)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}
    shards = {one for stage in place.stages if stage.sharded is not None for one in stage.sharded.buckets}
    at_rest = sum(storages.values()) + sum(bucket.kept_bytes for bucket in shards)
    state = dict(place.optimizer.state())
    moments = {
        part.name: np.stack([part.of(state[p][kind]).numpy() for kind in ("exp_avg", "exp_avg_sq")])
        for p, fused in parameters.items()
        if p in state
        for part in fused
    }
    held = place.whole((fused, p) for p, fused in parameters.items())
    weights = {part.name: part.of(p.detach()).float().clone().numpy() for fused, p in held for part in fused}
    size = place.topology.units[place.place.unit]
    return Answer(size.tensor_slice(place.place), size.tp, results, gradients, weights, dict(waits), at_rest, moments)


def _parameters(place: PlaceStep) -> dict[torch.nn.Parameter, Sequence[Part]]:
    return {p: fused for stage in place.stages for p, fused in parts_of(stage.model)}


def _beside(packing: ThreadPoolExecutor, feed: Feed, portion: Portion) -> Cargo:
    """A portion's cargo, made in a thread of its own, as in training."""
    return packing.submit(feed, portion).result()


def _gradients(step: PlaceStep) -> dict[str, np.ndarray]:
    """Of whole parameters, gathered from the replicas, of which each has a part."""
    own = {piece.parameter: (piece.begin, piece.weight.grad) for piece in step.optimizer.pieces}
    found: dict[str, np.ndarray] = {}
    for parameter, fused in _parameters(step).items():
        begin, part = own.get(parameter, (0, None))
        whole = torch.full((parameter.numel(),), -torch.inf)
        if part is not None:
            whole[begin : begin + part.numel()] = part
        if step.groups.replicas is not None:
            dist.all_reduce(whole, dist.ReduceOp.MAX, group=step.groups.replicas)
        if not torch.isneginf(whole).all():
            found |= {part.name: part.of(whole.view(parameter.shape)).numpy() for part in fused}
    return found


def cut(topology: PipelineTopology) -> PipelineTopology:
    """The topology with the cuts of every unit."""
    shape = GENERATING if GENERATOR in topology.units else SHAPE
    return with_cuts(topology, shape, vocab_size=VOCAB, image=IMAGE, audio=AUDIO)


@cache
def _template(shape: ModelShape, tied: bool, dropout: float) -> MultimodalModel:
    """The whole model, of which a copy takes half as long as to make another."""
    return whole_model(shape, tied=tied, dropout=dropout)


def stages_of(
    topology: PipelineTopology, place: Place, groups: ProcessGroups, dtype: torch.dtype = torch.float32, *, tied: bool = True
) -> list[Stage]:
    """The stages of one place of this process."""
    shape = GENERATING if GENERATOR in topology.units else SHAPE
    cuts = bounds(topology, shape, vocab_size=VOCAB, image=IMAGE, audio=AUDIO)[place.unit]
    make_model = partial(deepcopy, _template(shape, tied, topology.dropout))
    own = groups.of_place[place]
    stages = build_stages(
        make_model, topology, place, cuts, seed=SEED, device=CPU, slices=own.slices, context=own.context, dtype=dtype
    )
    enlarge(torch.nn.ModuleList(stages))
    return stages
