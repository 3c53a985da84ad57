"""The channels over which the processes of a pipeline exchange messages: an in-order queue for each sender, receiver and kind.

NCCL ignores tags, and runs the sends and receives of a communicator in the order in which a process posts them: a receive that
is posted in front of a send holds up the send, on both sides if both do so. So no communicator is used in both directions, nor
for activations and gradients together: every channel has its own, in which one process only sends and the other only receives,
with gloo as with NCCL. Nodes that may be lost are the exception: theirs share a group of gloo, and differ by tags.

A channel connects two places of the topology (`PipelineTopology.number`), and so tells the messages of units that share ranks
apart. What a process sends from one of its places to another needs no channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from operator import methodcaller
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from headrace.plan import Topology
from headrace.schedule import Kind
from headrace.trainer.devices import told_if_lacking
from headrace.trainer.pipeline.gradient_flow import GradientFlow, needs_output_gradient
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from headrace.trainer.starting import GROUP_TIMEOUT

Replica = tuple[str, int]
"""A replica of a unit: the unit and its index."""
Pair = tuple[Replica, Replica]
"""A replica, and one of the next unit that takes samples from it."""


class Channel(NamedTuple):
    """All messages of a kind, FORWARD or BACKWARD, that one place, by its number, sends to another."""

    kind: Kind
    sender: int
    receiver: int

    @property
    def back(self) -> Channel:
        """The channel of the activations that a channel of gradients answers."""
        return Channel(Kind.FORWARD, self.receiver, self.sender)


class ChannelRanks(NamedTuple):
    """What carries a channel: two ranks, and what tells the channel from others between them."""

    sender: int
    receiver: int
    tag: int


class ChannelEnd(NamedTuple):
    """One process's end of a channel."""

    backend: dist.ProcessGroup
    """What sends or receives; a `torch.distributed` backend, which has the methods of a group."""
    peer: int
    """The other process's rank in it."""
    tag: int = 0
    """The same for all messages of a channel. A group of gloo can have several channels, with a tag for each."""


OpenEnd = Callable[[ChannelRanks], ChannelEnd | None]
"""A function that opens a channel together with the process at the other end; None: this process is at neither end of it."""


class Channels:
    """The ends of the channels of one process. All processes of a topology make one at the same time."""

    def __init__(
        self,
        topology: PipelineTopology,
        rank: int,
        device: torch.device,
        open_end: OpenEnd | None = None,
        wait: Callable[[dist.Work], object] = methodcaller("wait"),
    ) -> None:
        """Open the channels within units, and between replicas of the same lane (see `headrace.trainer.pipeline.routes`).

        `open_end`: None is `group_end`. `wait`: function that waits for a message.
        """
        self._topology, self._rank, self._device, self._wait = topology, rank, device, wait
        self._rank_of = topology.rank_of
        self._unit_of = [index for index, size in enumerate(topology.units.values()) for _ in range(size.num_places)]
        self._open_end = open_end or partial(group_end, rank=rank, device=device)
        self._ends: dict[Channel, ChannelEnd] = {}
        self._open_pairs: set[Pair] = set()
        self._open(channels_within(topology))
        self.open_between(pairs_of_lanes(topology))

    def __getitem__(self, channel: Channel) -> ChannelEnd:
        return self._ends[channel]

    def are_within(self, channel: Channel) -> bool:
        """Whether both ends of the channel are places of this process."""
        return self._rank_of[channel.sender] == self._rank_of[channel.receiver]

    def open_between(self, pairs: Iterable[Pair]) -> None:
        """Open the channels between these replicas that are not open yet. All processes call it with the same pairs."""
        missing = set(pairs) - self._open_pairs
        if missing:
            self._open(channel for pair in missing for channel in channels_between(self._topology, *pair))
            self._open_pairs |= missing

    def _open(self, channels: Iterable[Channel]) -> None:
        """Open channels and send a message over each, which connects the two processes.

        All processes go by the same order, so that they never wait for each other in a circle, also where a backend connects with
        its first message. On gloo neither of a channel's two goes on before the message has arrived, on NCCL before they are
        connected and it is enqueued.
        """
        for channel in sorted(channels):
            ranks = self._ranks(channel)
            end = None if self.are_within(channel) else self._open_end(ranks)
            if end is not None:
                self._ends[channel] = end
                first = torch.zeros(1, device=self._device)
                pass_on = end.backend.send if ranks.sender == self._rank else end.backend.recv
                with told_if_lacking("messages between two ranks", type(end.backend).__name__, self._device):
                    self._wait(pass_on([first], end.peer, end.tag))

    def _ranks(self, channel: Channel) -> ChannelRanks:
        """Return what is to carry a channel. Two ranks have at most one of each kind between the same two units."""
        kind, sender, receiver = channel
        units = self._unit_of[sender] * len(self._topology.units) + self._unit_of[receiver]
        line = units if self._topology.shares_ranks else 0
        return ChannelRanks(self._rank_of[sender], self._rank_of[receiver], line * len(Kind) + kind)


def group_end(ranks: ChannelRanks, rank: int, device: torch.device) -> ChannelEnd | None:
    """Make a channel's own group of `torch.distributed`, and return this rank's end; None: it is at neither.

    Every process of the default group calls it, as torch numbers groups; those at neither end do not wait for anybody. Groups of
    gloo share the thread of the default group that moves their bytes: each one's own would wake up 100 times a second.
    """
    both = sorted((ranks.sender, ranks.receiver))
    shares = isinstance(_default_backend(device), dist.ProcessGroupGloo)
    group = dist.new_group(both, timeout=GROUP_TIMEOUT, backend=_shared_gloo() if shares else None)
    if rank not in both:
        return None
    # The backend is called directly: the overhead of torch.distributed and of a group's dispatch takes as long as a message.
    backend = cast(dist.ProcessGroup, group._get_backend(device))  # it has the same methods
    return ChannelEnd(backend, peer=1 - both.index(rank))


def _default_backend(device: torch.device) -> object:
    return dist.distributed_c10d._get_default_group()._get_backend(device)


def _shared_gloo() -> str:
    """Return the name of a backend: gloo on the default group's devices, with one more thread a group."""

    def make(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = cast(dist.ProcessGroupGloo, _default_backend(torch.device("cpu"))).options._devices  # type: ignore[attr-defined]
        options._timeout, options._threads = timeout, 1
        return dist.ProcessGroupGloo(store, rank, size, options)

    name = "shared_gloo"
    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, make, devices=["cpu"])
    return name


def channels_within(topology: PipelineTopology) -> Iterator[Channel]:
    """Yield the channels between adjacent stages, and from the last stage to the first one where a unit has several chunks."""
    for unit, size in topology.units.items():
        flow, parts = GradientFlow.of(topology, unit), topology.num_parts(unit)
        links = {(position % size.pp, (position + 1) % size.pp) for position in range(parts - 1)}
        backward = {
            ((position + 1) % size.pp, position % size.pp) for position in range(parts - 1) if flow.sends_gradient(position + 1)
        }
        for replica in range(size.dp):
            for number in range(size.num_slices):
                places = [topology.number(Place(unit, replica, stage, number)) for stage in range(size.pp)]
                for kind, of_kind in ((Kind.FORWARD, links), (Kind.BACKWARD, backward)):
                    yield from (Channel(kind, places[one], places[other]) for one, other in of_kind if one != other)


def channels_between(topology: PipelineTopology, source: Replica, target: Replica) -> Iterator[Channel]:
    """Yield the channels between a replica and one of the next unit: those between `slice_pairs`, there and back."""
    last = topology.units[source[0]].pp - 1
    ends, begins = (
        [topology.number(Place(unit, replica, stage, index)) for index in range(topology.units[unit].num_slices)]
        for (unit, replica), stage in ((source, last), (target, 0))
    )
    for sender, receiver in slice_pairs(len(ends), len(begins)):
        yield Channel(Kind.FORWARD, ends[sender], begins[receiver])
        if needs_output_gradient(topology, source[0]):
            yield Channel(Kind.BACKWARD, begins[receiver], ends[sender])


def slice_pairs(senders: int, receivers: int) -> list[tuple[int, int]]:
    """Return the slices of a stage, and of one of the next unit, between which each share of a handover's rows goes.

    There are as many shares as both numbers of slices divide. So each slice sends as much as the others of its stage, and
    receives as much.
    """
    return [(number % senders, number % receivers) for number in range(math.lcm(senders, receivers))]


def pairs_of_lanes(topology: PipelineTopology) -> Iterator[Pair]:
    """Yield the pairs of replicas in the same lane, between which samples pass where no plan has them change the lane."""
    for unit, behind in Topology(replicas=1, microbatches=1, stages=topology.stages).feeds.items():
        size, next_size = topology.replicas[unit], topology.replicas[behind]
        lanes = math.gcd(size, next_size)
        for replica in range(size):
            lane, per_lane = replica * lanes // size, next_size // lanes
            yield from (((unit, replica), (behind, other)) for other in range(lane * per_lane, (lane + 1) * per_lane))
