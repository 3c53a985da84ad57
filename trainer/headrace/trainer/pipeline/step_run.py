"""The state of one place's share of a step: what each action takes, computes and sends."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headrace.schedule import ZERO_BUBBLE, Action, Kind
from headrace.trainer.models.loss import StepLoss
from headrace.trainer.pipeline.action_clock import ActionClock
from headrace.trainer.pipeline.cargo import Cargo, Feed
from headrace.trainer.pipeline.channels import Channel
from headrace.trainer.pipeline.chunk import Chunk, Output
from headrace.trainer.pipeline.message_order import Message, Program
from headrace.trainer.pipeline.routes import Routes
from headrace.trainer.pipeline.send_receive import Wire
from headrace.trainer.pipeline.sharded_weights import ShardedWeights
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from headrace.trainer.pipeline.unit_exchange import Exchange, Join, joined
from headrace.trainer.pipeline.weight_passes import WeightPasses


class Backwards(Protocol):
    """Who wants to know when a chunk's gradients are there, before the step ends."""

    def last_backward(self, chunk: int) -> None:
        """The next backward of the chunk is its last one in this step."""

    def ran_backward(self, chunk: int) -> None:
        """None of the chunk's actions is left in this step."""


@dataclass(slots=True, eq=False)
class Totals:
    """One process's part of a step's loss; empty except on the last stages of the LLM and the generator."""

    device: torch.device
    target_weight: float = 0.0
    _losses: list[tuple[Sequence[int], Tensor]] = field(default_factory=list)
    """Samples and loss of each portion."""

    def add(self, loss: StepLoss, samples: Sequence[int]) -> None:
        """Add the loss of a portion with these samples. The host does not wait for it."""
        self.target_weight += loss.target_weight
        self._losses.append((samples, loss.loss_sum.detach()))

    @property
    def loss_sum(self) -> Tensor:
        """The sum of all losses, a float64 scalar on the device. To read it is to wait for the computation of the step.

        It is added up behind the last action: between two computations the same work takes several times as long.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for _, loss in self._losses:
            total += loss
        return total

    def non_finite_samples(self) -> list[int]:
        """Return the samples of portions whose loss is not finite. Waits for the device: for a step whose loss is not finite."""
        return [sample for samples, loss in self._losses if not math.isfinite(float(loss)) for sample in samples]


@dataclass(slots=True, eq=False)
class _Held:
    """What a position keeps of a portion between its forward and its backward."""

    output: Output
    hidden: Tensor | None = None
    arrived: Mapping[str, Tensor] = field(default_factory=dict)
    """The rows (t, width) that came from each upstream unit; empty except on the unit's first position."""


class _Link(NamedTuple):
    """Channel and number of a message between two adjacent positions of a unit."""

    channel: Channel
    number: int


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """What an action does with one of its portions.

    All moves are worked out before the step begins: between two computations, which leave nothing in the caches, the same work
    takes several times as long.
    """

    kind: Kind
    portion: int
    chunk: Chunk
    position: int
    source: _Link | None
    """Message from the adjacent position that the input comes from; None at the unit's end, where it comes by exchanges."""
    target: _Link | None
    """Message to the adjacent position that the output goes to; None at the unit's end, where it goes by exchanges."""
    width: int
    """Row width of the input."""
    has_backward: bool
    sends_gradient: bool
    """Both as in `GradientFlow`, for this position."""
    frees_cargo: bool
    """Whether no later action needs the portion's cargo."""
    takes: Sequence[Message]
    """The messages that it needs."""


class StepRun:
    """The state of one step in progress at one place."""

    def __init__(
        self,
        topology: PipelineTopology,
        place: Place,
        chunks: Sequence[Chunk],
        wire: Wire,
        routes: Routes,
        feed: Feed,
        *,
        backwards: Backwards | None = None,
        sharded: Sequence[ShardedWeights] = (),
    ) -> None:
        """`chunks`: of the place. `backwards`: is told of the last backward of each chunk. `sharded`: what gathers the weights of
        each chunk; empty if every replica keeps all."""
        self.totals = Totals(chunks[0].device)
        self.clock = ActionClock(place, wire, chunks[0].device)
        self._chunks, self._wire, self._feed = chunks, wire, feed
        self._number = topology.number(place)
        self._peers = [topology.number(replace(place, stage=stage)) for stage in range(topology.units[place.unit].pp)]
        self.program = Program(topology, routes, (place.unit, place.replica, place.stage))
        self._last = self.program.flow.num_parts - 1  # the unit's last position
        self._portions = self.program.portions  # from here on a portion is identified by its index in this list
        self._arriving = {channel: deque(messages) for channel, messages in self.program.arriving().items()}  # not posted yet
        self._taken_by: dict[Message, Move] = {}
        self._backwards = backwards
        self._passes = WeightPasses(sharded, topology, routes, self.program)
        self._cargo: dict[int, Cargo] = {}
        self._held: dict[tuple[int, int], _Held] = {}  # by portion and position
        self._autocasts = torch.is_autocast_enabled(self._chunks[0].device.type)
        self._defers_weights = topology.schedule == ZERO_BUBBLE
        self._deferred_weights: dict[tuple[int, int], Callable[[], None]] = {}  # by portion and position

    def num_rows(self, kind: Kind) -> dict[int, int]:
        """Return the number of rows of each microbatch in actions of this kind. Waits for the data of all portions.

        Of places that share sequences it is that of the one with most: what follows from it, they do alike.
        """

        def rows(portion: int) -> int:
            cargo = self._cargo.get(portion) or self._load(portion)
            return cargo.num_rows if cargo.most_rows is None else cargo.most_rows

        return {microbatch: sum(map(rows, portions)) for microbatch, portions in self.program.microbatches(kind).items()}

    # -- before the step --------------------------------------------------------------------------------------------

    def moves(self, action: Action) -> list[Move]:
        """Return the moves of an action, one for each of its portions."""
        position, flow = self.program.position(action), self.program.flow
        before, behind = position - 1, position + 1
        source, target = (behind, before) if action.kind == Kind.BACKWARD else (before, behind)
        chunk = self._chunks[action.chunk]
        moves = [
            Move(
                kind=action.kind,
                portion=portion,
                chunk=chunk,
                position=position,
                source=self._link(action.kind, portion, position, source, arrives=True),
                target=self._link(action.kind, portion, position, target, arrives=False),
                width=chunk.token_width if source > self._last else chunk.width,
                has_backward=flow.has_backward(position),
                sends_gradient=flow.sends_gradient(position),
                frees_cargo=action.kind == Kind.BACKWARD and action.chunk == 0,
                takes=self.program.takes(action, portion),
            )
            for portion in self.program.portions_of(action)
        ]
        self._taken_by.update((message, move) for move in moves for message in move.takes)
        return moves

    def _link(self, kind: Kind, portion: int, position: int, other: int, *, arrives: bool) -> _Link | None:
        """Return the message link between a position of this place and an adjacent one; None past the unit's ends."""
        if not 0 <= other <= self._last or kind == Kind.WEIGHT:
            return None
        peer = self._peers[other % len(self._peers)]
        channel = Channel(kind, peer, self._number) if arrives else Channel(kind, self._number, peer)
        return _Link(channel, self.program.link_number(portion, position, other))

    # -- actions ----------------------------------------------------------------------------------------------------

    def load(self, moves: Sequence[Move]) -> None:
        """Load the data of an action: a forward's. Its backward has the same, and weights, which come behind it, need none."""
        for move in moves:
            if move.kind == Kind.FORWARD and move.portion not in self._cargo:
                self._load(move.portion)

    def post(self, moves: Sequence[Move]) -> None:
        """Post the receives of an action, and all of their channels that are sent before them."""
        for move in moves:
            for message in move.takes:
                waiting = self._arriving[message.kind, message.sender]
                while message in self._taken_by:  # until it is posted
                    earliest = waiting.popleft()
                    self._expect(earliest, self._taken_by.pop(earliest))

    def _expect(self, message: Message, move: Move) -> None:
        cargo = self._cargo.get(move.portion) or self._load(move.portion)
        is_forward = move.kind == Kind.FORWARD
        if move.source is not None:
            if cargo.num_rows:
                shape = (move.chunk.rows_between_stages(cargo.num_rows), move.width)
                self._wire.expect(shape, *move.source, requires_grad=is_forward and move.sends_gradient)
            return
        for exchange in cargo.arriving if is_forward else cargo.leaving:
            if exchange.number == message.number:
                self._wire.expect((exchange.num_rows, move.width), self._from(move.kind, exchange), message.number)

    def take(self, action: Action, moves: Sequence[Move], *, last_of_chunk: bool) -> None:
        """Run an action whose receives were posted. last_of_chunk: whether none of its chunk's actions is left in the step."""
        told = self._backwards if last_of_chunk else None
        for number, move in enumerate(moves):
            if told is not None and number == len(moves) - 1 and not self._passes:
                told.last_backward(move.position // len(self._peers))
            _RUN[move.kind](self, move)
            if move.frees_cargo:
                del self._cargo[move.portion]
        if self._passes:
            self._passes.end(action)  # only then do replicas sum gradients, so that all do both in one order
        if told is not None and (moves or self._passes):
            told.ran_backward(action.chunk)

    def _run_forward(self, move: Move) -> None:
        cargo = self._cargo[move.portion]
        if not cargo.num_rows:
            return
        hidden: Tensor | None = None
        arrived: dict[str, Tensor] = {}
        if move.source is not None:
            hidden = self._wire.receive(*move.source)
        else:
            for unit, join in cargo.joins.items():
                own = [exchange for exchange in cargo.arriving if exchange.unit == unit]
                needs_gradient = unit in self.program.units_needing_gradient
                arrived[unit] = self._receive(move, own, join).requires_grad_(needs_gradient)
        with self.clock.computing, self._passes.of_portion(move.position // len(self._peers), move.kind):
            output = move.chunk(cargo.inputs[move.position // len(self._peers)], hidden, arrived)
        if move.has_backward:
            self._held[move.portion, move.position] = _Held(output, hidden, arrived)
        if output.loss is not None:
            self.totals.add(output.loss, self._portions[move.portion].samples)
        if output.rows is not None and move.target is not None:
            self._wire.send(output.rows, *move.target)
        elif output.rows is not None:
            for exchange in cargo.leaving:
                self._send(Kind.FORWARD, exchange, output.rows)

    def _run_backward(self, move: Move) -> None:
        held = self._held.pop((move.portion, move.position), None)
        if held is None:
            return
        rows, loss = held.output.rows, held.output.loss
        ends: list[Tensor] = []
        gradients: list[Tensor | None] = []
        if loss is not None and (loss.target_weight or loss.is_shared) and loss.loss_sum.requires_grad:
            ends.append(loss.loss_sum)
            gradients.append(None)
        if rows is not None and (move.source is not None or rows.numel()):
            gradient = self._gradient(move)
            if rows.requires_grad:  # False in a frozen LLM if the portion has no media
                ends.append(rows)
                gradients.append(gradient if gradient.dtype is rows.dtype else gradient.to(rows.dtype))
        if ends:
            weights = self._passes.of_portion(move.position // len(self._peers), move.kind)
            with self.clock.computing, self._as_in_forward(), weights:
                torch.autograd.backward(ends, gradients)
            if self._defers_weights:
                self._deferred_weights[move.portion, move.position] = move.chunk.take_weight_gradients()
        if move.sends_gradient and move.target is not None and held.hidden is not None:
            self._wire.send(_gradient_of(held.hidden), *move.target)
        of_arrived = {unit: _gradient_of(tokens) for unit, tokens in held.arrived.items() if tokens.requires_grad}
        for exchange in self._cargo[move.portion].arriving if of_arrived else ():
            if exchange.unit in of_arrived:
                self._send(Kind.BACKWARD, exchange, of_arrived[exchange.unit])

    def _gradient(self, move: Move) -> Tensor:
        if move.source is not None:
            return self._wire.receive(*move.source)
        cargo = self._cargo[move.portion]
        assert cargo.gradient_join is not None, "the unit behind sends a gradient"
        return self._receive(move, cargo.leaving, cargo.gradient_join)

    def _run_weights(self, move: Move) -> None:
        compute = self._deferred_weights.pop((move.portion, move.position), None)
        if compute is None:
            return
        with self.clock.computing, self._as_in_forward():
            compute()

    def _as_in_forward(self) -> AbstractContextManager[object]:
        """Return a context for a backward with autocast off, so that its dtypes are those of its forward."""
        return torch.autocast(self._chunks[0].device.type, enabled=False) if self._autocasts else nullcontext()

    # -- messages ---------------------------------------------------------------------------------------------------

    def _receive(self, move: Move, exchanges: Sequence[Exchange], join: Join) -> Tensor:
        """Return the rows (t, width) that the stage gets from another unit. Collective among its slices.

        exchanges: those of this slice, which there are none of if it receives none of these rows.
        """
        own = [self._wire.receive(self._from(move.kind, exchange), exchange.number) for exchange in exchanges]
        if not own:
            own = [torch.empty(0, move.width, dtype=self._wire.dtype, device=move.chunk.device)]
        return joined(own, join, move.chunk.gather_slices)

    def _from(self, kind: Kind, exchange: Exchange) -> Channel:
        return Channel(kind, exchange.peer, self._number)

    def _send(self, kind: Kind, exchange: Exchange, rows: Tensor) -> None:
        """Send an exchange's share of these rows."""
        if not exchange.is_all_of(rows):
            rows = rows.detach()[exchange.rows]
        self._wire.send(rows, Channel(kind, self._number, exchange.peer), exchange.number)

    # -- data -----------------------------------------------------------------------------------------------------------

    def _load(self, number: int) -> Cargo:
        with self.clock.waiting_for_data:
            cargo = self._cargo[number] = self._feed(self._portions[number])
        return cargo


_RUN = {Kind.FORWARD: StepRun._run_forward, Kind.BACKWARD: StepRun._run_backward, Kind.WEIGHT: StepRun._run_weights}
"""Functions rather than bound methods: a run that held its own methods would be a reference cycle, and keep the connections of
a lost generation until Python collects cycles."""


def _gradient_of(tensor: Tensor) -> Tensor:
    """Return the gradient of a received tensor, or zeros if nothing downstream of it has a target."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
