"""What the runtime sends and keeps, counted, and what a slice of a layer costs the host beside a whole layer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.report import Row, Section, at_most
from benchmarks.timing import progress
from headrace.errors import HeadraceError
from headrace.model_shape import MODEL_SHAPES, TransformerShape
from headrace.sample import UNIT_COLUMNS
from headrace.spec import parse
from headrace.trainer.models.attention import Segments
from headrace.trainer.models.block import decoder_blocks
from headrace.trainer.models.rotary import rotation
from headrace.trainer.pipeline.deadlock import check_order
from headrace.trainer.pipeline.layer_partition import bounds
from headrace.trainer.pipeline.live_bytes import LiveBytes
from headrace.trainer.pipeline.routes import Routes
from headrace.trainer.pipeline.stage_building import build_stages
from headrace.trainer.pipeline.tensor_parallel import Slices
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from headrace.trainer.pipeline.zero1 import ShardedAdamW
from tests.fake_replicas import fake_replicas
from tests.verify.batches import AUDIO, IMAGE, SHAPE, VOCAB, make_row, packed, whole_model
from tests.verify.comparison import plan_of_step
from tests.verify.covering import covering_cases
from tests.verify.parts import STRENGTH
from tests.verify.processes import cut

REPLICAS, SLICES, IN_FLIGHT = 4, 2, 4
WIDE = replace(SHAPE, llm=TransformerShape(layers=2, width=512, heads=4, kv_heads=4, mlp=1376, gated=True))
HOST_GOAL = 1.15
ROWS = 8  # so few that the host's time is all that there is
CALLS, QUICK_CALLS = 300, 30
QUICK_CASES = 60


def sections(*, quick: bool) -> list[Section]:
    """Nothing of it needs a second process."""
    return [_rehearsal(quick=quick), _replicas(), _in_flight(), _slice(quick=quick)]


def _rehearsal(*, quick: bool) -> Section:
    """Every rank's messages, on queues that keep their order and ignore tags, as NCCL's do."""
    progress("rehearsal of messages")
    cases = covering_cases(STRENGTH)[: QUICK_CASES if quick else None]
    stopped, num_ranks = 0, 0
    for case in cases:
        topology = cut(parse(PipelineTopology, case.topology, "topology"))
        routes = Routes(plan_of_step(case, topology, 0, 0, {}), topology.replicas)
        try:
            for rank in range(topology.world_size):
                check_order(topology, routes, topology.places(rank))
        except HeadraceError:
            stopped += 1
        num_ranks += topology.world_size
    row = Row(
        name=f"of {len(cases)} cases of `make verify`, stopped or mixed",
        value=stopped,
        goal=at_most(0),
        detail=f"{num_ranks:,} ranks",
    )
    return Section(title="Messages rehearsed on queues that keep their order and know no tags, as NCCL's", rows=[row])


def _replicas() -> Section:
    """A step of ZeRO-1 on one of several replicas, as `ShardedAdamW` describes it."""
    layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    gradients = sum(parameter.nbytes for parameter in layers.parameters())
    with fake_replicas(REPLICAS) as begun:
        optimizer = ShardedAdamW([list(layers.parameters())], dist.group.WORLD)
        begun.clear()
        optimizer.last_backward(0)
        layers(torch.ones(2, 1024, requires_grad=True)).sum().backward()
        optimizer.ran_backward(0)
        optimizer.reduce()
        optimizer.step(1e-3)
    row = Row(
        name="sent by a replica, of the gradients' bytes",
        value=sum(num_bytes for _, num_bytes in begun) / gradients,
        unit="x",
        goal=at_most(2 * (REPLICAS - 1) / REPLICAS + 1e-5),  # beside them, which gradients exist
        detail="2 (n - 1) / n: gradients reduce-scattered, weights gathered",
    )
    return Section(title=f"A step of {REPLICAS} replicas, three of them torch's fake: bytes that a ring sends", rows=[row])


def _in_flight() -> Section:
    """Forwards of a stage in bfloat16, none of which has had its backward, behind a projector that learns in either case."""
    learning, frozen = (_kept_by_further_microbatches(frozen=frozen) for frozen in (False, True))
    row = Row(
        name="kept by a frozen LLM over one that learns",
        value=frozen / learning,
        unit="x",
        goal=at_most(1.0),
        detail=f"{frozen / 2**20:.2f} and {learning / 2**20:.2f} MiB by each microbatch behind the first",
    )
    return Section(
        title=f"Two layers of width {WIDE.llm.width}, {IN_FLIGHT} microbatches in flight: bytes kept for the backward", rows=[row]
    )


def _kept_by_further_microbatches(*, frozen: bool) -> float:
    topology = parse(PipelineTopology, {"units": {"vision": {}, "llm": {"frozen": frozen}}}, "topology")
    cuts = bounds(topology, WIDE, vocab_size=VOCAB, image=IMAGE, audio=AUDIO)["llm"]
    make, place, cpu = partial(whole_model, WIDE), Place("llm", 0, 0, 0), torch.device("cpu")
    (stage,) = build_stages(make, topology, place, cuts, seed=1, device=cpu, slices=None, dtype=torch.bfloat16)
    batch = packed([make_row(number, audio=False) for number in range(4)], UNIT_COLUMNS["llm"])
    tokens = torch.ones(int(stage.input_token_counts("vision", batch).sum()), stage.width, requires_grad=True)
    outputs, held = [], list[int]()
    with LiveBytes() as meter, torch.autocast("cpu", torch.bfloat16):
        for _ in range(IN_FLIGHT):
            outputs.append(stage(stage.prepare(batch), None, {"vision": tokens}))
            held.append(meter.now)
    return (held[-1] - held[0]) / (IN_FLIGHT - 1)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Forward and backward of one layer of the decoder."""

    run: Callable[..., Tensor]
    rows: Tensor
    args: tuple[object, ...]

    def __call__(self) -> None:
        self.run(self.rows, *self.args).sum().backward()  # type: ignore[no-untyped-call]


def _slice(*, quick: bool) -> Section:
    progress("host time of a slice of a layer")
    shape = replace(MODEL_SHAPES["tiny"].llm, layers=2)
    torch.set_num_threads(1)
    args = (rotation(torch.arange(ROWS)[:, None], shape.width // shape.heads, theta=1e4), Segments.of(torch.tensor([0, ROWS])))
    rows = torch.ones(ROWS, shape.width, requires_grad=True)
    whole, sliced = (_chain(decoder_blocks(shape)) for _ in range(2))
    with fake_replicas(SLICES):
        group = dist.group.WORLD
        assert group is not None, "the fake one"
        slices = Slices(group)
        slices.shard(list(sliced))
        layers = [slices.with_rows(layer, ROWS) for layer in sliced]
        pair = _Layer(_apply(list(whole)), rows, args), _Layer(_apply(layers), rows, args)
        ratios = [_ratio(*pair) for _ in range(QUICK_CALLS if quick else CALLS)]
    row = Row(
        name="a slice of two layers over the whole layers",
        value=median(ratios),
        unit="x",
        goal=at_most(HOST_GOAL),
        detail=f"{len(ratios)} rounds by turns, forward and backward of {ROWS} rows",
    )
    return Section(title="Host time of tensor parallelism, with collectives that do nothing (torch's fake)", rows=[row])


def _chain(blocks: nn.ModuleList) -> nn.ModuleList:
    for parameter in blocks.parameters():
        nn.init.normal_(parameter, std=0.02)
    return blocks


def _apply(layers: list[Callable[..., Tensor]]) -> Callable[..., Tensor]:
    def run(x: Tensor, *args: object) -> Tensor:
        for layer in layers:
            x = layer(x, *args)
        return x

    return run


def _ratio(whole: _Layer, sliced: _Layer) -> float:
    times = []
    for layer in (whole, sliced):
        begin_s = time.thread_time()  # without other programs' turns; a backward on the CPU runs in the thread that asks for it
        layer()
        times.append(time.thread_time() - begin_s)
    return times[1] / times[0]
