"""Execution of one process's share of a step: its stage's actions in the schedule's order, and the messages around them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.schedule import ZERO_BUBBLE, Action, Kind
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.models.loss import StepLoss
from headrace.trainer.pipeline.action_clock import ActionClock
from headrace.trainer.pipeline.chunk import Chunk, Output
from headrace.trainer.pipeline.deadlock import actions_of, check_order, check_rows
from headrace.trainer.pipeline.gradient_flow import GradientFlow, needs_output_gradient
from headrace.trainer.pipeline.routes import Portion, Routes
from headrace.trainer.pipeline.send_receive import Wire
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from headrace.trainer.pipeline.unit_exchange import Exchange, Exchanges, in_order, row_ranges

Feed = Callable[[Portion], PackedMicrobatch]
"""A function that returns the unit's columns of a portion's samples, on the device, without samples that failed to decode."""


class Backwards(Protocol):
    """Who wants to know when a chunk's gradients are there, before the step ends."""

    def last_backward(self, chunk: int) -> None:
        """The next backward of the chunk is its last one in this step."""

    def ran_backward(self, chunk: int) -> None:
        """None of the chunk's actions is left in this step."""


@dataclass(slots=True)
class Totals:
    """One process's part of a step's loss; empty except on the last stages of the LLM and the generator."""

    loss_sum: float = 0.0
    num_targets: int = 0
    non_finite_samples: list[int] = field(default_factory=list)
    """Samples of portions whose loss is not finite."""


@dataclass(slots=True, eq=False)
class _Held:
    """What a position keeps of a portion between its forward and its backward."""

    output: Output
    hidden: Tensor | None = None
    arrived: Sequence[Tensor] = ()
    """Tensors received by the exchanges of `_Cargo.arriving`, in their order; empty except on the unit's first position."""


class _Cargo(NamedTuple):
    """A portion's data and exchanges, kept for all of its actions on this process."""

    data: PackedMicrobatch
    num_rows: int
    arriving: Sequence[Exchange]
    """Exchanges with upstream units; empty except on the unit's first stage."""
    leaving: Sequence[Exchange]
    """Exchanges with the downstream unit; empty except on the unit's last stage."""


class _Link(NamedTuple):
    """Peer and tag of a message between two adjacent positions of a unit."""

    rank: int
    """Rank of the process at the other end."""
    tag: int


@dataclass(frozen=True, slots=True, eq=False)
class _Move:
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


class Executor:
    """Runs the steps of one process, which has one stage object for each of the schedule's chunks."""

    def __init__(
        self,
        topology: PipelineTopology,
        place: Place,
        chunks: Sequence[Chunk],
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
        wait: Callable[[dist.Work], object] = dist.Work.wait,
        backwards: Backwards | None = None,
    ) -> None:
        """`dtype`: dtype of messages. `group`: the group whose ranks are the topology's, None for all processes.
        `wait`: function that waits for a message to arrive. `backwards`: is told of the last backward of each chunk.
        """
        self.topology = topology
        self.place = place
        self.chunks = chunks
        self.flow = GradientFlow.of(topology, place.unit)
        self.units_needing_gradient = {unit for unit in topology.units if needs_output_gradient(topology, unit)}
        self.exchanges = Exchanges(topology, place)
        self.peers = [topology.rank(replace(place, stage=stage)) for stage in range(topology.units[place.unit].pp)]
        """Ranks of the stages of this replica and TP slice, in stage order."""
        self.wire = Wire(chunks[0].device, dtype, group, wait)
        self.backwards = backwards
        self.clock = ActionClock(place, self.wire, chunks[0].device)
        """The clock of the last step."""

    def run(self, routes: Routes, feed: Feed) -> Totals:
        """Run forward and backward of all that the plan gives this process, adding to the gradients of its parameters.

        Messages may still be on their way until `wire.flush`.

        Raises, before anything is computed, HeadraceError if the plan would deadlock, and UserError if this process would keep
        more rows than its unit's `max_rows`.
        """
        check_order(self.topology, routes, self.place)
        run = _Run(self, routes, feed)
        actions = self.actions(routes)
        check_rows(self.topology, self.place, actions, run.num_rows)
        moves = [run.moves(action) for action in actions]
        ends = {action.chunk: number for number, action in enumerate(actions) if action.kind != Kind.FORWARD}
        for number, (of_action, coming) in enumerate(pairwise([*moves, []])):
            with run.clock.timing(actions[number]):
                if number == 0:
                    run.post(of_action)
                run.post(coming)  # one action ahead
                run.take(of_action, last_of_chunk=ends.get(actions[number].chunk) == number)
        self.clock = run.clock
        return run.totals

    def actions(self, routes: Routes) -> Sequence[Action]:
        """Return the actions of this process's stage, in schedule order."""
        return actions_of(self.topology, routes, self.place.unit, self.place.replica)[self.place.stage]


class _Run:
    """The state of one step in progress on one process."""

    def __init__(self, executor: Executor, routes: Routes, feed: Feed) -> None:
        self.totals = Totals()
        self.clock = ActionClock(executor.place, executor.wire, executor.chunks[0].device)
        self._place, self._flow, self._units_needing_gradient = executor.place, executor.flow, executor.units_needing_gradient
        self._chunks, self._wire, self._peers = executor.chunks, executor.wire, executor.peers
        self._routes, self._feed, self._exchanges = routes, feed, executor.exchanges
        self._last = self._flow.num_parts - 1  # the unit's last position
        self._is_first, self._is_last = self._place.stage == 0, self._place.stage == len(self._peers) - 1
        # From here on a portion is identified by its index in this list.
        self._portions = routes.portions(self._place.unit, self._place.replica)
        self._by_kind = {
            Kind.FORWARD: _numbers(portion.forward for portion in self._portions),
            Kind.BACKWARD: _numbers(portion.backward for portion in self._portions),
        }
        self._by_kind[Kind.WEIGHT] = self._by_kind[Kind.BACKWARD]
        self._backwards = executor.backwards
        self._cargo: dict[int, _Cargo] = {}
        self._held: dict[tuple[int, int], _Held] = {}  # by portion and position
        self._autocasts = torch.is_autocast_enabled(self._chunks[0].device.type)
        self._defers_weights = executor.topology.schedule == ZERO_BUBBLE
        self._deferred_weights: dict[int, Callable[[], None]] = {}  # by portion

    def num_rows(self, kind: Kind) -> dict[int, int]:
        """Return the number of rows of each microbatch in actions of this kind. Waits for the data of all portions."""
        return {
            microbatch: sum((self._cargo.get(portion) or self._load(portion)).num_rows for portion in portions)
            for microbatch, portions in self._by_kind[kind].items()
        }

    # -- before the step --------------------------------------------------------------------------------------------

    def moves(self, action: Action) -> list[_Move]:
        """Return the moves of an action, one for each of its portions."""
        position = action.chunk * len(self._peers) + self._place.stage
        before, behind = position - 1, position + 1
        source, target = (behind, before) if action.kind == Kind.BACKWARD else (before, behind)
        chunk = self._chunks[action.chunk]
        return [
            _Move(
                kind=action.kind,
                portion=portion,
                chunk=chunk,
                position=position,
                source=self._link(action.kind, portion, position, source),
                target=self._link(action.kind, portion, position, target),
                width=chunk.token_width if source > self._last else chunk.width,
                has_backward=self._flow.has_backward(position),
                sends_gradient=self._flow.sends_gradient(position),
                frees_cargo=action.kind == Kind.BACKWARD and action.chunk == 0,
            )
            for portion in self._by_kind[action.kind].get(action.microbatch, ())
        ]

    def _link(self, kind: Kind, portion: int, position: int, other: int) -> _Link | None:
        """Return the message link between a position of this process and an adjacent one; None past the unit's ends."""
        if not 0 <= other <= self._last:
            return None
        number = portion * (self._last + 1) + min(position, other)
        return _Link(self._peers[other % len(self._peers)], _tag(kind, number))

    # -- actions ----------------------------------------------------------------------------------------------------

    def post(self, moves: Sequence[_Move]) -> None:
        """Post the receives of an action."""
        for move in moves:
            is_forward = move.kind == Kind.FORWARD
            if not is_forward and (move.kind == Kind.WEIGHT or not move.has_backward):
                return
            cargo = self._cargo.get(move.portion) or self._load(move.portion)
            if move.source is not None:
                if cargo.num_rows:
                    shape = (cargo.num_rows, move.width)
                    self._wire.expect(shape, *move.source, requires_grad=is_forward and move.sends_gradient)
                continue
            for exchange in cargo.arriving if is_forward else cargo.leaving:
                requires_grad = is_forward and exchange.unit in self._units_needing_gradient
                source, tag = exchange.neighbours.source, _tag(move.kind, exchange.number)
                self._wire.expect((exchange.num_rows, move.width), source, tag, requires_grad=requires_grad)

    def take(self, moves: Sequence[_Move], *, last_of_chunk: bool) -> None:
        """Run an action whose receives were posted. last_of_chunk: whether none of its chunk's actions is left in the step."""
        told = self._backwards if last_of_chunk else None
        for number, move in enumerate(moves):
            if told is not None and number == len(moves) - 1:
                told.last_backward(move.position // len(self._peers))
            _RUN[move.kind](self, move)
            if move.frees_cargo:
                del self._cargo[move.portion]
        if told is not None and moves:
            told.ran_backward(moves[0].position // len(self._peers))

    def _run_forward(self, move: _Move) -> None:
        cargo = self._cargo[move.portion]
        if not cargo.num_rows:
            return
        hidden: Tensor | None = None
        arrived: list[Tensor] = []
        tokens: dict[str, Tensor] = {}
        if move.source is not None:
            hidden = self._wire.receive(*move.source)
        else:
            arrived = [self._receive(Kind.FORWARD, exchange) for exchange in cargo.arriving]
            tokens = in_order(cargo.arriving, arrived)
        with self.clock.computing():
            output = move.chunk(cargo.data, hidden, tokens)
        if move.has_backward:
            self._held[move.portion, move.position] = _Held(output, hidden, arrived)
        if output.loss is not None:
            self._count(output.loss, move.portion)
        if output.rows is not None and move.target is not None:
            self._wire.send(output.rows, *move.target)
        elif output.rows is not None:
            for exchange in cargo.leaving:
                rows = output.rows if exchange.is_all_of(output.rows) else output.rows.detach()[exchange.rows]
                self._send(Kind.FORWARD, exchange, rows)

    def _count(self, loss: StepLoss, portion: int) -> None:
        loss_sum = float(loss.loss_sum.detach())
        if not math.isfinite(loss_sum):
            self.totals.non_finite_samples.extend(self._portions[portion].samples)
        self.totals.loss_sum += loss_sum
        self.totals.num_targets += loss.num_targets

    def _run_backward(self, move: _Move) -> None:
        held = self._held.pop((move.portion, move.position), None)
        if held is None:
            return
        rows, loss = held.output.rows, held.output.loss
        ends: list[Tensor] = []
        gradients: list[Tensor | None] = []
        if loss is not None and loss.num_targets and loss.loss_sum.requires_grad:
            ends.append(loss.loss_sum)
            gradients.append(None)
        if rows is not None and (move.source is not None or rows.numel()):
            gradient = self._gradient(move, rows)
            if rows.requires_grad:  # False in a frozen LLM if the portion has no media
                ends.append(rows)
                gradients.append(gradient if gradient.dtype is rows.dtype else gradient.to(rows.dtype))
        if ends:
            with self.clock.computing(), self._as_in_forward():
                torch.autograd.backward(ends, gradients)
            if self._defers_weights:
                self._deferred_weights[move.portion] = move.chunk.take_weight_gradients()
        if move.sends_gradient and move.target is not None and held.hidden is not None:
            self._wire.send(_gradient_of(held.hidden), *move.target)
        arriving = self._cargo[move.portion].arriving
        for exchange, tensor in zip(arriving, held.arrived, strict=False):  # nothing arrives by exchange after the first position
            if tensor.requires_grad:
                self._send(Kind.BACKWARD, exchange, _gradient_of(tensor))

    def _gradient(self, move: _Move, output: Tensor) -> Tensor:
        if move.source is not None:
            return self._wire.receive(*move.source)
        leaving = self._cargo[move.portion].leaving
        if len(leaving) == 1 and leaving[0].is_all_of(output):
            return self._receive(Kind.BACKWARD, leaving[0])
        gradient = torch.zeros_like(output)
        for exchange in leaving:
            gradient[exchange.rows] = self._receive(Kind.BACKWARD, exchange).to(gradient.dtype)
        return gradient

    def _run_weights(self, move: _Move) -> None:
        compute = self._deferred_weights.pop(move.portion, None)
        if compute is None:
            return
        with self.clock.computing(), self._as_in_forward():
            compute()

    def _as_in_forward(self) -> AbstractContextManager[object]:
        """Return a context for a backward with autocast off, so that its dtypes are those of its forward."""
        return torch.autocast(self._chunks[0].device.type, enabled=False) if self._autocasts else nullcontext()

    # -- messages ---------------------------------------------------------------------------------------------------

    def _receive(self, kind: Kind, exchange: Exchange) -> Tensor:
        return self._wire.receive(exchange.neighbours.source, _tag(kind, exchange.number))

    def _send(self, kind: Kind, exchange: Exchange, rows: Tensor) -> None:
        for rank in exchange.neighbours.receivers:
            self._wire.send(rows, rank, _tag(kind, exchange.number))

    # -- data -----------------------------------------------------------------------------------------------------------

    def _load(self, number: int) -> _Cargo:
        with self.clock.waiting_for_data():
            data = self._feed(self._portions[number])
        num_rows = self._chunks[0].num_rows(data)
        arriving = self._arriving(number, data) if num_rows and self._is_first else ()
        leaving = self._leaving(number, data) if num_rows and self._is_last else ()
        cargo = self._cargo[number] = _Cargo(data, num_rows, arriving, leaving)
        return cargo

    def _arriving(self, number: int, data: PackedMicrobatch) -> Sequence[Exchange]:
        handovers = self._routes.into(self._portions[number])
        units = {handover.source.unit for handover in handovers}
        ranges = {unit: row_ranges(data, self._chunks[0].input_token_counts(unit, data)) for unit in units}
        return self._exchanges.arriving(handovers, ranges)

    def _leaving(self, number: int, data: PackedMicrobatch) -> Sequence[Exchange]:
        handovers = self._routes.out_of(self._portions[number])
        return self._exchanges.leaving(handovers, row_ranges(data, self._chunks[-1].token_counts(data))) if handovers else ()


_RUN = {Kind.FORWARD: _Run._run_forward, Kind.BACKWARD: _Run._run_backward, Kind.WEIGHT: _Run._run_weights}
"""Functions rather than bound methods: a run that held its own methods would be a reference cycle, and keep the connections of
a lost generation until Python collects cycles."""


def _numbers(microbatches: Iterable[int]) -> dict[int, list[int]]:
    """Return the indices of the portions of each microbatch. microbatches: the microbatch of each portion."""
    grouped: dict[int, list[int]] = {}
    for number, microbatch in enumerate(microbatches):
        grouped.setdefault(microbatch, []).append(number)
    return grouped


def _tag(kind: Kind, number: int) -> int:
    """Return the tag of a message, unique among all that two processes exchange in a step.

    Two processes exchange either links within a unit or handovers between units, never both, so their numbers do not collide.
    A gradient has the odd tag after that of the activations it answers (see `Wire`).
    """
    return 2 * number + kind


def _gradient_of(tensor: Tensor) -> Tensor:
    """Return the gradient of a received tensor, or zeros if nothing downstream of it has a target."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
