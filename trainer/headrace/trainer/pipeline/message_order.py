"""The order in which messages pass over every channel: the sender's program, which both ends work out from plan and schedule.

A process sends in the order of its actions, within an action portion by portion, and for each portion handover by handover. The
receiver needs the messages of one channel in almost the same order, but not quite: under `interleaved` the stages of two units
may run their chunks in different orders. It therefore posts its receives in the sender's order, and keeps what it does not need
yet by number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from headrace.execution_spec import COLOCATED
from headrace.schedule import Action, Kind, Schedule, build
from headrace.trainer.pipeline.gradient_flow import GradientFlow, needs_output_gradient
from headrace.trainer.pipeline.routes import Handover, Portion, Routes
from headrace.trainer.pipeline.topology import PipelineTopology

Post = tuple[str, int, int]
"""Where a program runs: unit, replica and stage. The TP slices of a stage run the same program."""


class Message(NamedTuple):
    """A message between two programs, or from one to itself. One without rows is left out on both sides."""

    kind: Kind
    number: int
    """Tells messages of the same kind between the same two programs apart: a link's or a handover's number within the step."""
    sender: Post
    receiver: Post
    is_handover: bool
    """Whether it passes between two units, and not between two positions of one."""


class Program:
    """What one stage of one replica does in a step: its actions in order, and for each of them the messages that it takes and
    sends."""

    def __init__(self, topology: PipelineTopology, routes: Routes, post: Post) -> None:
        unit, replica, self._stage = self.post = post
        self._topology, self._routes = topology, routes
        self._pp, self._last = topology.units[unit].pp, topology.num_parts(unit) - 1
        self.flow = GradientFlow.of(topology, unit)
        self.units_needing_gradient = {other for other in topology.units if needs_output_gradient(topology, other)}
        """Units that take gradients of their outputs."""
        self.portions = routes.portions(unit, replica)
        self._by_kind = {
            Kind.FORWARD: _numbers(portion.forward for portion in self.portions),
            Kind.BACKWARD: _numbers(portion.backward for portion in self.portions),
        }
        self._by_kind[Kind.WEIGHT] = self._by_kind[Kind.BACKWARD]
        self.actions = actions_of(topology, routes, unit, replica)[self._stage]

    def position(self, action: Action) -> int:
        """Return the position at which an action runs, among the parts of its unit."""
        return action.chunk * self._pp + self._stage

    def microbatches(self, kind: Kind) -> Mapping[int, Sequence[int]]:
        """Return the portions of each microbatch in actions of this kind. A portion is its index in `portions`."""
        return self._by_kind[kind]

    def portions_of(self, action: Action) -> Sequence[int]:
        """Return the portions of an action, in the order in which it runs them."""
        return self._by_kind[action.kind].get(action.microbatch, ())

    def forward_s(self, portion: int) -> float:
        """Return how long the forward of a portion takes in its whole unit (`Routes.forward_s`)."""
        return self._routes.forward_s(self.portions[portion])

    def takes(self, action: Action, portion: int) -> list[Message]:
        """Return the messages that an action needs for a portion."""
        here = self.position(action)
        if action.kind == Kind.FORWARD:
            if here > 0:
                return [self._link(action.kind, portion, here - 1, here)]
            return [_forward(self._topology, handover) for handover in self._routes.into(self.portions[portion])]
        if action.kind == Kind.WEIGHT or not self.flow.has_backward(here):
            return []
        if here < self._last:
            return [self._link(action.kind, portion, here + 1, here)]
        return [_backward(self._topology, handover) for handover in self._routes.out_of(self.portions[portion])]

    def sends(self, action: Action, portion: int) -> list[Message]:
        """Return the messages that an action sends of a portion, in this order."""
        here = self.position(action)
        if action.kind == Kind.FORWARD:
            if here < self._last:
                return [self._link(action.kind, portion, here, here + 1)]
            return [_forward(self._topology, handover) for handover in self._routes.out_of(self.portions[portion])]
        if action.kind == Kind.WEIGHT or not self.flow.sends_gradient(here):
            return []
        if here > 0:
            return [self._link(action.kind, portion, here, here - 1)]
        return [
            _backward(self._topology, handover)
            for handover in self._routes.into(self.portions[portion])
            if handover.source.unit in self.units_needing_gradient
        ]

    def arriving(self) -> dict[tuple[Kind, Post], list[Message]]:
        """Return all messages of the step to this program, by kind and sender, in the order in which they are sent."""
        found: dict[tuple[Kind, Post], list[tuple[tuple[int, int, int], Message]]] = {}
        turns: dict[Post, Mapping[tuple[Kind, int, int], int]] = {}
        for action in self.actions:
            for portion in self.portions_of(action):
                for message in self.takes(action, portion):
                    if (of_sender := turns.get(message.sender)) is None:
                        unit, replica, stage = message.sender
                        of_sender = _turns(_shape(self._topology, self._routes, unit, replica), stage)
                        turns[message.sender] = of_sender
                    microbatch, chunk, within = self._sent_in(message, action)
                    turn = of_sender[message.kind, microbatch, chunk], within, message.number
                    found.setdefault((message.kind, message.sender), []).append((turn, message))
        return {channel: [message for _, message in sorted(messages)] for channel, messages in found.items()}

    def _sent_in(self, message: Message, action: Action) -> tuple[int, int, int]:
        """Return microbatch and chunk of the action that sends a message which `action` takes, and an order within that action.

        An action sends in the order of its portions, which is that of the messages' numbers: handovers are numbered by source,
        links by portion. Only a gradient's sender is the target of its handover, whose portions differ in their forward there.
        """
        if not message.is_handover:
            adjacent = self.position(action) + (1 if message.kind == Kind.BACKWARD else -1)
            return action.microbatch, adjacent // self._pp, 0
        handover = self._routes.handovers[message.number]
        if message.kind == Kind.FORWARD:
            return handover.source.forward, self._topology.chunks_of(handover.source.unit) - 1, 0
        return handover.target.backward, 0, handover.target.forward

    def link_number(self, portion: int, position: int, other: int) -> int:
        """Return the number of the messages of a portion between two adjacent positions of the unit."""
        return portion * (self._last + 1) + min(position, other)

    def _link(self, kind: Kind, portion: int, sender: int, receiver: int) -> Message:
        """Return the message between two adjacent positions of the unit."""
        unit, replica, _ = self.post
        return Message(
            kind=kind,
            number=self.link_number(portion, sender, receiver),
            sender=(unit, replica, sender % self._pp),
            receiver=(unit, replica, receiver % self._pp),
            is_handover=False,
        )


def _forward(topology: PipelineTopology, handover: Handover) -> Message:
    return Message(Kind.FORWARD, handover.number, _end(topology, handover.source), _begin(handover.target), is_handover=True)


def _backward(topology: PipelineTopology, handover: Handover) -> Message:
    return Message(Kind.BACKWARD, handover.number, _begin(handover.target), _end(topology, handover.source), is_handover=True)


def _begin(portion: Portion) -> Post:
    return portion.unit, portion.replica, 0


def _end(topology: PipelineTopology, portion: Portion) -> Post:
    return portion.unit, portion.replica, topology.units[portion.unit].pp - 1


def _numbers(microbatches: Iterable[int]) -> dict[int, list[int]]:
    """Return the indices of the portions of each microbatch. microbatches: the microbatch of each portion."""
    grouped: dict[int, list[int]] = {}
    for number, microbatch in enumerate(microbatches):
        grouped.setdefault(microbatch, []).append(number)
    return grouped


def actions_of(topology: PipelineTopology, routes: Routes, unit: str, replica: int) -> Schedule:
    """Return the actions of each stage of one replica of a unit, in schedule order, with the plan's microbatch numbers."""
    return _actions(_shape(topology, routes, unit, replica))


class _Shape(NamedTuple):
    """All that the actions of a replica of a unit follow from. It is the same for most replicas and most steps."""

    schedule: str
    stages: tuple[tuple[str, int], ...]
    """Number of stages of each unit, in pipeline order."""
    chunks: int
    in_flight: int | None
    unit: str
    occupied: tuple[int, ...]
    """The microbatches that the replica runs."""
    forwards_first: bool
    """Whether all forwards come before everything else, as where encoders are colocated."""
    pieces: int


def _shape(topology: PipelineTopology, routes: Routes, unit: str, replica: int) -> _Shape:
    in_flight = topology.in_flight if routes.in_flight is None else routes.in_flight
    occupied = routes.occupied(replica, in_step=topology.shards_weights)
    forwards_first = topology.sharing == COLOCATED and topology.units[unit].on is not None
    pieces = topology.units[unit].pieces
    stages = tuple(topology.stages.items())
    return _Shape(topology.schedule, stages, topology.chunks, in_flight, unit, occupied, forwards_first, pieces)


@lru_cache(maxsize=256)
def _actions(shape: _Shape) -> Schedule:
    units, sizes = zip(*shape.stages, strict=True)
    first = sum(sizes[: units.index(shape.unit)])
    schedule = _schedule(shape.schedule, shape.stages, len(shape.occupied), shape.chunks, shape.in_flight)
    of_unit = schedule[first : first + dict(shape.stages)[shape.unit]]
    if shape.forwards_first:
        of_unit = tuple(tuple(sorted(actions, key=lambda action: action.kind != Kind.FORWARD)) for actions in of_unit)
    return tuple(tuple(piece for action in actions for piece in _as_run(action, shape)) for actions in of_unit)


def _as_run(action: Action, shape: _Shape) -> Iterator[Action]:
    """Yield an action of the schedule with the plan's microbatch, or the pieces that it is cut into: forwards from the first
    layers to the last, the others back.
    """
    action = replace(action, microbatch=shape.occupied[action.microbatch])
    if shape.pieces == 1:
        yield action
    else:
        chunks = range(shape.pieces) if action.kind == Kind.FORWARD else reversed(range(shape.pieces))
        yield from (replace(action, chunk=chunk) for chunk in chunks)


@lru_cache(maxsize=64)
def _schedule(name: str, stages: tuple[tuple[str, int], ...], count: int, chunks: int, in_flight: int | None) -> Schedule:
    """Build the schedule of `count` microbatches numbered from 0."""
    return build(name, dict(stages), range(count), chunks=chunks, in_flight=in_flight)


@lru_cache(maxsize=256)
def _turns(shape: _Shape, stage: int) -> dict[tuple[Kind, int, int], int]:
    """Return the place of every action of a stage among all of them, by kind, microbatch and chunk."""
    actions = _actions(shape)[stage]
    return {(action.kind, action.microbatch, action.chunk): place for place, action in enumerate(actions)}
