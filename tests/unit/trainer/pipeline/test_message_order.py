"""The messages of real executors under an in-order transport, which is SIMULATED: none waits for itself, none is mixed up.

And the data that they ask for: every portion once, in the order in which the portions are packed ahead.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.plan import Topology
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.strategies import plan as make_plan
from headrace.schedule import Kind
from headrace.spec import STRATEGIES, parse
from headrace.trainer.loading.collate import PackedMicrobatch, collate
from headrace.trainer.pipeline.channels import Channel, channels_between, channels_within, pairs_of_lanes
from headrace.trainer.pipeline.chunk import Inputs
from headrace.trainer.pipeline.emulated_stage import WIDTH, EmulatedChunk
from headrace.trainer.pipeline.executor import Executor, run_step
from headrace.trainer.pipeline.routes import Portion, Routes
from headrace.trainer.pipeline.topology import PipelineTopology
from tests.examples import with_examples
from tests.verify.cases import WEIGHTS, Case, every_pipeline
from tests.verify.processes import cut

MICROBATCHES, SAMPLES, REJECTED = 6, 24, 7
PIPELINES = st.deferred(lambda: st.sampled_from([*every_pipeline()]))
EVERY_SCHEDULE = [
    Case(schedule, "joint", ("vision", "llm"), "llm in 2", "all learn")
    for schedule in ("1f1b", "gpipe", "interleaved", "eager", "zero-bubble")
]


class Operation(NamedTuple):
    """A send or receive, as a process posts it."""

    channel: Channel
    number: int
    num_rows: int
    num_waits: int
    """Waits for messages that the process posted before it."""


@dataclass
class Recorder:
    """Takes the place of an executor's wire, and records what it is asked for."""

    rank: int
    dtype: torch.dtype = torch.float32
    posted: list[Operation] = field(default_factory=list)
    awaited: list[tuple[Channel, int]] = field(default_factory=list)
    fed: list[Portion] = field(default_factory=list)
    """Portions whose data the stage asked for, in order."""
    waited_s: float = 0.0
    most_unused: Counter[Channel] = field(default_factory=Counter)
    """Most receives of a channel that were posted and not used yet."""
    sent_bytes: Counter[Channel] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.channels = self
        self._unused: dict[tuple[Channel, int], Tensor] = {}
        self._own: dict[tuple[Channel, int], Tensor] = {}

    def open_between(self, _: object) -> None:
        """No channel needs to be opened."""

    def send(self, tensor: Tensor, channel: Channel, number: int) -> None:
        if channel.receiver == self.rank:
            self._own[channel, number] = tensor.detach().requires_grad_(tensor.requires_grad)
        else:
            self.posted.append(Operation(channel, number, len(tensor), len(self.awaited)))
            self.sent_bytes[channel] += tensor.numel() * tensor.element_size()

    def expect(self, shape: tuple[int, int], channel: Channel, number: int, *, requires_grad: bool = False) -> None:
        if channel.sender != self.rank:
            self.posted.append(Operation(channel, number, shape[0], len(self.awaited)))
            self._unused[channel, number] = torch.zeros(shape, requires_grad=requires_grad)
            unused = sum(channel == of for of, _ in self._unused)
            self.most_unused[channel] = max(self.most_unused[channel], unused)

    def receive(self, channel: Channel, number: int) -> Tensor:
        if channel.sender == self.rank:
            return self._own.pop((channel, number))
        self.awaited.append((channel, number))
        return self._unused.pop(self.awaited[-1])


class Instant(EmulatedChunk):
    def prepare(self, data: PackedMicrobatch) -> Inputs:
        """A row for each token that passes between units."""
        return replace(super().prepare(data), num_rows=int(data.images_per_sample.sum()))

    def sleep(self, seconds: float) -> None:
        """Takes no time."""


def topology_of(case: Case) -> PipelineTopology:
    return cut(parse(PipelineTopology, case.topology, "topology"))


def routes_of(strategy: str, topology: PipelineTopology, seed: int) -> Routes:
    rng = np.random.default_rng(seed)
    costs = {unit: rng.lognormal(0, 1, SAMPLES) * (rng.random(SAMPLES) < 0.7) + 1e-3 for unit in topology.stages}
    planned = Topology(replicas=topology.units["llm"].dp, microbatches=MICROBATCHES, stages=topology.stages)
    own = {unit: dp for unit, dp in topology.replicas.items() if unit != "llm"}
    execution = Execution(may_cross_replicas=True, unit_replicas=own)
    plan = make_plan(strategy, np.arange(SAMPLES), costs, planned, seed=seed, execution=execution)
    return Routes(plan, topology.replicas)


def recorded(topology: PipelineTopology, routes: Routes, most_tokens: int = 1) -> list[Recorder]:
    """What every rank posts in a step, in which every REJECTED-th sample could not be decoded.

    most_tokens: of a sample, between units.
    """
    empty = collate(())
    recorders = []
    for rank in range(topology.world_size):
        place = topology.place(rank)
        ends = place.unit == list(topology.units)[-1] and place.stage == topology.stages[place.unit] - 1
        parts = [
            Instant(
                defaultdict(float),
                (1, 1, 1),
                is_last=ends and c == topology.chunks - 1,
                num_slices=topology.units[place.unit].tp,
            )
            for c in range(topology.chunks)
        ]
        recorder = Recorder(rank)
        recorders.append(recorder)
        executor = Executor(topology, place, parts, cast(Any, recorder))

        def data_of(portion: Portion, fed: list[Portion] = recorder.fed) -> PackedMicrobatch:
            fed.append(portion)
            good = [sample for sample in portion.samples if sample % REJECTED]
            counts = torch.tensor([tokens_of(sample, most_tokens) for sample in good], dtype=torch.int32)
            return replace(empty, sample_ids=torch.tensor(good, dtype=torch.int64), images_per_sample=counts)

        run_step([executor], routes, [executor.prepare.feed(routes, data_of)])
    return recorders


def tokens_of(sample: int, most: int) -> int:
    return 1 + sample % most


def simulate(recorders: list[Recorder], communicator: Callable[[Channel], object]) -> tuple[set[int], list[str]]:
    """The ranks that never get to their end, and the messages that are taken for others.

    The operations of a communicator run one after the other on each rank. Each begins once the rank has got through the waits in
    front of it. A send ends only with the receive that takes it, and no operation holds up the process that posts it.
    """
    queues: dict[tuple[int, object], list[Operation]] = defaultdict(list)
    for recorder in recorders:
        for operation in recorder.posted:
            queues[recorder.rank, communicator(operation.channel)].append(operation)
    at: Counter[tuple[int, object]] = Counter()
    past: Counter[int] = Counter()  # number of waits that each rank has got through
    arrived: set[tuple[Channel, int]] = set()
    mixed = []

    def head(rank: int, of: object) -> Operation | None:
        rest = queues[rank, of][at[rank, of] :]
        return rest[0] if rest and rest[0].num_waits <= past[rank] else None

    progress = True
    while progress:
        progress = False
        for recorder in recorders:
            while past[recorder.rank] < len(recorder.awaited) and recorder.awaited[past[recorder.rank]] in arrived:
                past[recorder.rank] += 1
                progress = True
        for rank, of in list(queues):
            while (sent := head(rank, of)) and sent.channel.sender == rank:
                taken = head(sent.channel.receiver, of)
                if taken is None or taken.channel != sent.channel:
                    break
                if (sent.number, sent.num_rows) != (taken.number, taken.num_rows):
                    mixed.append(f"{sent} taken for {taken}")
                arrived.add((taken.channel, taken.number))
                at[rank, of] += 1
                at[sent.channel.receiver, of] += 1
                progress = True
    stuck = {recorder.rank for recorder in recorders if past[recorder.rank] < len(recorder.awaited)}
    return stuck | {rank for (rank, of), queue in queues.items() if at[rank, of] < len(queue)}, mixed


def too_early(recorders: list[Recorder], rank: int) -> list[Operation]:
    """The receives that a rank posts in front of a send of its own which they wait for."""
    sent: dict[tuple[Channel, int], int] = {}  # message -> how many of the rank's operations it follows from
    follows: Counter[int] = Counter()  # of each rank's state so far
    at: Counter[int] = Counter()
    past: Counter[int] = Counter()
    progress = True
    while progress:
        progress = False
        for recorder in recorders:
            own = recorder.rank
            while at[own] < len(recorder.posted):
                operation = recorder.posted[at[own]]
                if past[own] < operation.num_waits:
                    if (message := recorder.awaited[past[own]]) not in sent:
                        break
                    past[own] += 1
                    follows[own] = max(follows[own], sent[message])
                    continue
                at[own] += 1
                if operation.channel.sender == own:
                    sent[operation.channel, operation.number] = at[own] if own == rank else follows[own]
                progress = True
    received = [(at, operation) for at, operation in enumerate(recorders[rank].posted) if operation.channel.receiver == rank]
    return [operation for at, operation in received if sent[operation.channel, operation.number] > at]


def all_channels(topology: PipelineTopology, routes: Routes) -> set[Channel]:
    pairs = {*pairs_of_lanes(topology), *routes.pairs}
    return {*channels_within(topology), *(channel for pair in pairs for channel in channels_between(topology, *pair))}


def problems(case: Case, seed: int) -> Iterator[str]:
    """What goes wrong with the messages of a case, in words."""
    topology = topology_of(case)
    routes = routes_of(case.strategy, topology, seed)
    recorders = recorded(topology, routes)  # each rank's check_order runs in it, too
    stuck, mixed = simulate(recorders, lambda channel: channel)
    yield from (f"rank {rank} is stuck" for rank in stuck)
    yield from mixed
    used = {operation.channel for recorder in recorders for operation in recorder.posted}
    yield from (f"{channel} is not open" for channel in used - all_channels(topology, routes))
    for recorder in recorders:
        place = topology.place(recorder.rank)
        if recorder.fed != routes.portions(place.unit, place.replica):
            yield f"rank {recorder.rank} asks for its portions otherwise than once each and in order: {recorder.fed}"
    for rank in range(topology.world_size):
        yield from (f"rank {rank} waits with {operation} for itself" for operation in too_early(recorders, rank))
    most = max((count for recorder in recorders for count in recorder.most_unused.values()), default=0)
    if most > 4 * MICROBATCHES:
        yield f"{most} receives of a channel are posted at once"


@pytest.mark.slow
@with_examples(100)
@given(PIPELINES, st.sampled_from(STRATEGIES), st.sampled_from(WEIGHTS), st.integers(0, 2**16))
def test_every_message_of_any_case_arrives_in_its_place(pipeline: Case, strategy: str, weights: str, seed: int) -> None:
    case = replace(pipeline, strategy=strategy, weights=weights)
    assert list(problems(case, seed)) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_message_of_every_case_arrives_in_its_place() -> None:
    for seed, (pipeline, strategy) in enumerate(product(every_pipeline(), STRATEGIES)):
        case = replace(pipeline, strategy=strategy)
        assert list(problems(case, seed)) == [], case


@pytest.mark.parametrize("pipeline", EVERY_SCHEDULE, ids=lambda case: case.schedule)
def test_no_receive_is_posted_in_front_of_a_send_that_it_waits_for(pipeline: Case) -> None:
    """On NCCL it would run, and hold up what waits for the whole device, until the send that stands behind it."""
    topology = topology_of(pipeline)
    for seed in range(4):
        recorders = recorded(topology, routes_of(pipeline.strategy, topology, seed))
        assert [too_early(recorders, rank) for rank in range(topology.world_size)] == [[]] * topology.world_size
        posted = [operation for recorder in recorders for operation in recorder.posted]
        assert posted, "there are messages"


TWO_STAGES = Case("1f1b", "joint", ("vision", "llm"), "llm in 2", "all learn")


@pytest.mark.parametrize(
    ("what", "communicator"),
    [
        ("of a pair of ranks", lambda channel: frozenset(channel[1:])),
        ("of a pair and kind, where messages of a kind go both ways", lambda channel: (channel.kind, frozenset(channel[1:]))),
    ],
)
def test_channels_that_share_a_communicator_wait_for_themselves(what: str, communicator: Callable[[Channel], object]) -> None:
    """The simulation can fail: with communicators of less than a channel, which is how NCCL carries tagged messages."""
    both_ways = replace(TWO_STAGES, schedule="interleaved")
    topology = topology_of(both_ways)
    stuck, _ = simulate(recorded(topology, routes_of(both_ways.strategy, topology, 0)), communicator)
    assert stuck, what


def test_receives_in_the_order_of_their_use_would_be_mixed_up() -> None:
    """Where two units interleave their chunks, a sender's order is not that in which the messages are needed."""
    case = Case("interleaved", "joint", ("vision", "llm"), "encoder in 2", "all learn")
    orders = []
    for seed in range(8):
        topology = topology_of(case)
        for recorder in recorded(topology, routes_of(case.strategy, topology, seed)):
            for channel in {of for of, _ in recorder.awaited}:
                posted = [operation.number for operation in recorder.posted if operation.channel == channel]
                orders.append(posted == [number for of, number in recorder.awaited if of == channel])
    assert not all(orders)


ROW_BYTES = 4 * WIDTH
SLICED = {
    "to 2 slices": {"vision": {}, "llm": {"tp": 2}},
    "from 2 slices": {"vision": {"tp": 2}, "llm": {}},
    "2 slices each": {"vision": {"tp": 2}, "llm": {"tp": 2}},
    "2 slices to 4, 2 replicas to 3": {"vision": {"dp": 2, "tp": 2}, "llm": {"dp": 3, "tp": 4}},
    "2 slices to 1, 2 replicas each": {"vision": {"dp": 2, "tp": 2}, "llm": {"dp": 2}},
    "3 slices to 2, 2 stages": {"vision": {"tp": 3, "pp": 2}, "llm": {"tp": 2, "pp": 2}},
}


@pytest.mark.parametrize("strategy", ["entrain", "orchmllm"])
@pytest.mark.parametrize("units", SLICED.values(), ids=SLICED)
def test_a_token_crosses_to_the_next_unit_once_and_its_gradient_comes_back_once(units: dict[str, Any], strategy: str) -> None:
    """Whatever the slices, also where samples are deferred and change lanes."""
    most = 9
    topology = parse(PipelineTopology, {"units": units}, "topology")
    routes = routes_of(strategy, topology, 0)
    recorders = recorded(topology, routes, most)
    assert simulate(recorders, lambda channel: channel) == (set(), [])
    tokens = sum(tokens_of(sample, most) for sample in range(SAMPLES) if sample % REJECTED)
    for kind, sender, receiver in ((Kind.FORWARD, "vision", "llm"), (Kind.BACKWARD, "llm", "vision")):
        sent = {channel: size / ROW_BYTES for channel, size in sent_bytes(recorders, topology, kind, sender, receiver).items()}
        assert sum(sent.values()) == tokens
        for unit, end in ((sender, 1), (receiver, 2)):
            of_slice: dict[int, float] = defaultdict(float)
            for channel, rows in sent.items():
                of_slice[topology.place(channel[end]).slice] += rows
            assert of_slice.keys() == set(range(units[unit].get("tp", 1)))
            messages = len(routes.handovers) * math.lcm(*(size.get("tp", 1) for size in units.values()))
            assert max(of_slice.values()) <= tokens / len(of_slice) + messages, "a row more for each message at most"


def test_samples_are_deferred_and_change_lanes_where_tokens_are_counted() -> None:
    topology = parse(PipelineTopology, {"units": SLICED["2 slices to 4, 2 replicas to 3"]}, "topology")
    assert any(one.source.forward < one.target.forward for one in routes_of("entrain", topology, 0).handovers)
    topology = parse(PipelineTopology, {"units": SLICED["2 slices to 1, 2 replicas each"]}, "topology")
    assert routes_of("orchmllm", topology, 0).pairs - {*pairs_of_lanes(topology)}


def sent_bytes(recorders: list[Recorder], topology: PipelineTopology, kind: Kind, sender: str, receiver: str) -> Counter[Channel]:
    """What was sent of a kind from one unit to another, by channel."""
    found: Counter[Channel] = Counter()
    for recorder in recorders:
        for channel, size in recorder.sent_bytes.items():
            if (channel.kind, *(topology.place(end).unit for end in channel[1:])) == (kind, sender, receiver):
                found[channel] += size
    return found
