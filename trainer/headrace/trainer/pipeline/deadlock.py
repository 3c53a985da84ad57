"""Checks, before a step computes anything, that its actions can all run: nothing could end a deadlock later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.errors import HeadraceError, UserError
from headrace.held_activations import activation_memory, freed_by
from headrace.plan import Microbatch, StepPlan, Topology
from headrace.schedule import Action, Kind
from headrace.trainer.pipeline.channels import Replica
from headrace.trainer.pipeline.gradient_flow import GradientFlow
from headrace.trainer.pipeline.message_order import Message, Post, Program
from headrace.trainer.pipeline.routes import Routes
from headrace.trainer.pipeline.shared_order import hosts_of, shared_order
from headrace.trainer.pipeline.topology import PipelineTopology, Place


@dataclass(frozen=True, slots=True, eq=False)
class Rehearsed:
    """What the rehearsal of a step tells a process, for each of its actions in their order."""

    turns: Sequence[Post]
    """The place whose next action it is."""
    needed: Sequence[int]
    """How many of the process's first actions must have sent before all messages that it takes can come."""


def check_order(topology: PipelineTopology, routes: Routes, places: Sequence[Place]) -> Rehearsed:
    """Rehearse a step for a process with these places, of which there are several where units share its rank.

    Raises HeadraceError, naming a blocked action, if a replica of its places or one that these exchange samples with would wait
    forever.

    Replicas that they exchange samples with through others count too, and all that share a rank with one of them. If samples
    change replicas, which connects nearly all of them, all are rehearsed as one first, which suffices for most plans and does not
    grow with their number; but not where ranks are shared, as replicas then differ in whose turn it is. It must suffice if
    replicas gather weights from each other, for which they meet in every action.
    """
    own = {(place.unit, place.replica, place.stage) for place in places}
    if (routes.crosses or topology.shards_weights) and not topology.shares_ranks:
        one_of_each = [(unit, 0) for unit in topology.units]
        as_one_post = {(unit, 0, stage) for unit, _, stage in own}
        as_one = _Rehearsal(topology, _as_one_replica(routes, topology), one_of_each, as_one_post)
        if as_one.is_done():
            return Rehearsed([*own] * len(as_one.needed), as_one.needed)
        if topology.shards_weights:
            raise HeadraceError(as_one.blocked())
    rehearsal = _Rehearsal(topology, routes, _connected_replicas(topology, routes, places), own)
    if not rehearsal.is_done():
        raise HeadraceError(rehearsal.blocked())
    return Rehearsed(rehearsal.turns, rehearsal.needed)


def check_rows(
    topology: PipelineTopology, place: Place, actions: Sequence[Action], num_rows: Callable[[Kind], Mapping[int, int]]
) -> None:
    """Raise UserError if a stage would keep more rows for backwards than its unit's `max_rows` while it runs these actions.

    num_rows: returns, for FORWARD or BACKWARD, the rows of each microbatch; called only if there is a limit. With several
    chunks per stage, a row in one chunk counts as 1 / chunks, since the chunk has that share of the layers.
    """
    size, flow = topology.units[place.unit], GradientFlow.of(topology, place.unit)
    if size.max_rows is None:
        return
    has_backward = np.array([flow.has_backward(action.chunk * size.pp + place.stage) for action in actions])
    takes, gives = (
        has_backward * np.array([rows.get(action.microbatch, 0) for action in actions])
        for rows in (num_rows(Kind.FORWARD), num_rows(Kind.BACKWARD))
    )
    kinds = np.array([action.kind for action in actions], np.int64)
    # Only 'zero-bubble' asks for weights, and it has one chunk: a stage is at the position of its number.
    until = freed_by(topology.schedule, has_weights=flow.has_weights(place.stage))
    peak = activation_memory(kinds, takes, gives, until).max(initial=0.0) / topology.chunks_of(place.unit)
    if peak > size.max_rows:
        raise UserError(
            f"stage {place.stage} of {place.unit} replica {place.replica} would keep {peak:.0f} rows at once, more than the "
            f"max_rows {size.max_rows} of its unit: let fewer microbatches be in flight, plan smaller ones (more microbatches), "
            "or turn on checkpointing and raise max_rows"
        )


def _connected_replicas(topology: PipelineTopology, routes: Routes, places: Sequence[Place]) -> set[Replica]:
    """Return the (unit, replica) pairs that exchange samples or share ranks with those of the places, directly or through others,
    and these themselves.
    """
    neighbours: dict[Replica, set[Replica]] = {}
    for rank in range(topology.world_size) if topology.shares_ranks else ():
        together = {(place.unit, place.replica) for place in topology.places(rank)}
        for one in together:
            neighbours.setdefault(one, set()).update(together)
    for handover in routes.handovers:
        one, other = ((portion.unit, portion.replica) for portion in (handover.source, handover.target))
        neighbours.setdefault(one, set()).add(other)
        neighbours.setdefault(other, set()).add(one)
    found, new = set(), {(place.unit, place.replica) for place in places}
    while new:
        found |= new
        new = {other for one in new for other in neighbours.get(one, ())} - found
    return found


def _as_one_replica(routes: Routes, topology: PipelineTopology) -> Routes:
    """Return routes in which one replica of each unit takes the samples of all, one for all that are in the same microbatches.

    An action then waits for all that it waits for in any replica. So if these actions can all run, so can those of every replica,
    since all replicas run the same ones where samples change replicas.
    """
    places: dict[int, dict[str, int]] = {}
    for unit, number in topology.replicas.items():
        for replica in range(number):
            for portion in routes.portions(unit, replica):
                for sample in portion.samples:
                    places.setdefault(sample, {})[unit] = portion.forward
    ways = list(dict.fromkeys(tuple(place[unit] for unit in topology.units) for place in places.values()))
    samples: list[dict[str, list[int]]] = [
        {unit: [] for unit in topology.units} for _ in range(1 + max(map(max, ways), default=-1))
    ]
    for sample, way in enumerate(ways):
        for unit, index in zip(topology.units, way, strict=True):
            samples[index][unit].append(sample)
    microbatches = [Microbatch(units={unit: tuple(ids) for unit, ids in of_index.items()}) for of_index in samples]
    shape = Topology(replicas=1, microbatches=len(microbatches), stages=topology.stages)
    plan = StepPlan(strategy="", seed=0, topology=shape, replicas=[microbatches], in_flight=routes.in_flight)
    return Routes(plan, dict.fromkeys(topology.units, 1))


@dataclass(slots=True, eq=False)
class _Channel:
    """The messages from one program to another, as an in-order transport carries them."""

    order: Sequence[int] = ()
    """Numbers of the messages in the order in which their receives are posted."""
    sent: int = 0
    received: int = 0

    def send(self, number: int) -> None:
        """Post a send. Raises HeadraceError if the receive that it would meet is that of another message."""
        expected = self.order[self.sent] if self.sent < len(self.order) else None
        if number != expected:
            raise HeadraceError(
                f"message {number} would be received as message {expected}: sender and receiver differ in the plan"
            )
        self.sent += 1


class _Rehearsal:
    """A dry run of all stages: each in turn takes its actions for as long as the messages that they need can arrive.

    A message arrives once its send and its receive are posted and all earlier ones of its channel have arrived. To post one holds
    up nothing but later messages of its channel. A receive that an action needs is posted in front of it, with all earlier ones
    of its channel; that some are posted an action ahead can only make messages arrive sooner.
    """

    def __init__(self, topology: PipelineTopology, routes: Routes, replicas: Collection[Replica], own: Collection[Post]) -> None:
        """`own`: the programs of one process, of which `turns` and `needed` tell."""
        self._own = own
        self.turns: list[Post] = []
        """Whose the actions of `own` were that have run, in their order."""
        self.needed: list[int] = []
        """For each of them, how many of the first ones had to run before."""
        self._schedule = topology.schedule
        self._programs = [
            Program(topology, routes, (unit, replica, stage))
            for unit, replica in sorted(replicas)
            for stage in range(topology.units[unit].pp)
        ]
        self._left = {program.post: deque(program.actions) for program in self._programs}
        self._channels: dict[tuple[Kind, Post, Post], _Channel] = {}
        self._turns: dict[Message, int] = {}  # place of each message on its channel
        self._carried: dict[Message, int] = {}  # how many of `own`'s actions had to run before what was sent and not taken yet
        self._had_run: dict[object, int] = {}  # the same, before what each process has run so far
        self._processes: dict[Post, tuple[object, ...]] = {program.post: (program.post,) for program in self._programs}
        self._due: dict[object, deque[Post]] = {}  # whose turn it is on each shared rank
        if topology.shares_ranks:
            self._processes = {program.post: hosts_of(topology, program.post) for program in self._programs}
            self._due = {rank: deque(posts) for rank, posts in shared_order(topology, self._programs).items()}
        self._forwards: set[tuple[Post, int, int]] = set()  # program, portion and chunk of the forwards that have run
        for program in self._programs:
            for (kind, sender), messages in program.arriving().items():
                self._channels[kind, sender, program.post] = _Channel([message.number for message in messages])
                self._turns.update((message, turn) for turn, message in enumerate(messages))

    def is_done(self) -> bool:
        """Run all actions that can run, and return whether these are all, and all messages have arrived."""
        while sum(map(self._advance, self._programs)):
            pass
        return not any(self._left.values()) and all(
            channel.received == channel.sent == len(channel.order) for channel in self._channels.values()
        )

    def blocked(self) -> str:
        """Return a sentence about the first action that waits forever."""
        post, action = next((post, left[0]) for post, left in self._left.items() if left)
        what, (unit, replica, stage) = f"the {action.kind.name.lower()} of microbatch {action.microbatch}", post
        return (
            f"the plan makes schedule {self._schedule!r} wait for itself: {what} on stage {stage} of {unit} "
            f"replica {replica} never gets its inputs; the plan must not have a sample in a unit before the one in front"
        )

    def _advance(self, program: Program) -> bool:
        """Run a program for as long as it does not have to wait; return whether it ran anything."""
        left = self._left[program.post]
        before = len(left)
        while left and self._take(program, left[0]):
            left.popleft()
        return len(left) < before

    def _take(self, program: Program, action: Action) -> bool:
        post, processes = program.post, self._processes[program.post]
        if self._due and not all(self._due[process] and self._due[process][0] == post for process in processes):
            return False
        portions = program.portions_of(action)
        forwards = {(post, portion, action.chunk) for portion in portions}
        if action.kind == Kind.FORWARD:
            self._forwards |= forwards
        elif not forwards <= self._forwards:
            return False
        needed = [message for portion in portions for message in program.takes(action, portion)]
        for message in needed:
            channel, turn = self._channels[message.kind, message.sender, message.receiver], self._turns[message]
            channel.received = max(channel.received, min(channel.sent, turn + 1))
            if channel.received <= turn:
                return False
        had_run = max((self._carried.pop(message) for message in needed), default=0)
        if post in self._own:
            self.turns.append(post)
            self.needed.append(had_run)
            had_run = len(self.needed)
        had_run = max(had_run, *(self._had_run.get(process, 0) for process in processes))
        self._had_run.update(dict.fromkeys(processes, had_run))
        for process in processes if self._due else ():
            self._due[process].popleft()
        for portion in portions:
            for message in program.sends(action, portion):
                self._carried[message] = had_run
                self._channels.setdefault((message.kind, message.sender, message.receiver), _Channel()).send(message.number)
        return True
