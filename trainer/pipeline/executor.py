"""One process's share of a step: the actions of its stage, in the schedule's order, and the messages around them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.schedule import ZERO_BUBBLE, Action, Kind
from trainer.collate import PackedMicrobatch
from trainer.models.loss import StepLoss
from trainer.pipeline.events import Event, Recording, clock_origin_s
from trainer.pipeline.exchange import Exchange, Exchanges, in_order, row_ranges
from trainer.pipeline.flow import GradientFlow, learns
from trainer.pipeline.order import actions_of, check_order, check_rows
from trainer.pipeline.routes import Portion, Routes
from trainer.pipeline.topology import PipelineTopology, Place
from trainer.pipeline.wire import Wire

Feed = Callable[[Portion], PackedMicrobatch]
"""The columns of a unit that a portion's samples have, on the device; fewer samples where some could not be decoded."""


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """What a stage makes of a portion; it leads back to what came in by autograd."""

    rows: Tensor | None = None
    """Hidden states for the next stage, on a unit's last one tokens for the unit behind; None where nothing is behind."""
    loss: StepLoss | None = None
    """On the last stage of the LLM, and of the generator."""


class Chunk(Protocol):
    """What the executor needs of one chunk of a stage: a `trainer.pipeline.stage.Stage`, or what stands in its place."""

    @property
    def device(self) -> torch.device: ...
    @property
    def width(self) -> int: ...
    @property
    def token_width(self) -> int: ...
    def num_rows(self, data: PackedMicrobatch) -> int: ...
    def tokens(self, data: PackedMicrobatch) -> Tensor: ...
    def tokens_of(self, unit: str, data: PackedMicrobatch) -> Tensor: ...
    def __call__(self, data: PackedMicrobatch, hidden: Tensor | None, arrived: Mapping[str, Tensor]) -> Output: ...
    def put_off(self) -> Callable[[], None]:
        """Computes, when it is called, the gradients that the last backward has left: only under `zero-bubble`."""


@dataclass(slots=True)
class Totals:
    """What a process has computed of a step's loss; nothing but on the last stages of LLM and generator."""

    loss_sum: float = 0.0
    num_targets: int = 0
    not_finite: list[int] = field(default_factory=list)
    """Samples of portions whose loss is no number."""


@dataclass(slots=True, eq=False)
class _Held:
    """What a position keeps of a portion between forward and backward."""

    output: Output
    hidden: Tensor | None = None
    arrived: Sequence[Tensor] = ()
    """Of `_Cargo.arriving`; nothing but on the unit's first position."""


@dataclass(frozen=True, slots=True, eq=False)
class _Cargo:
    """A portion whose data are there, for all of its visits to this process."""

    data: PackedMicrobatch
    num_rows: int
    arriving: Sequence[Exchange]
    """Nothing but on the unit's first stage."""
    leaving: Sequence[Exchange]
    """Nothing but on its last one."""


class Executor:
    """The stages of one process: as many as the schedule has chunks."""

    def __init__(
        self,
        topology: PipelineTopology,
        place: Place,
        stages: Sequence[Chunk],
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`dtype`: of what is sent. `group`: whose ranks are the topology's. None: all processes."""
        self.topology = topology
        self.place = place
        self.stages = stages
        self.flow = GradientFlow.of(topology, place.unit)
        self.learning = {unit for unit in topology.units if learns(topology, unit)}
        self.exchanges = Exchanges(topology, place)
        self.peers = [topology.rank(replace(place, stage=stage)) for stage in range(topology.units[place.unit].pp)]
        """Who has the stages of this replica and TP slice."""
        self.wire = Wire(stages[0].device, dtype, group)
        self.recording = Recording((), 0.0)
        """Of the last step."""

    def run(self, routes: Routes, feed: Feed) -> Totals:
        """Forward and backward of everything that the plan gives this process; gradients are added to its parameters'.

        Raises HeadraceError, before anything is computed, where the plan would have somebody wait for ever, and UserError where
        this process would keep more rows than it may.
        """
        check_order(self.topology, routes, self.place)
        run = _Run(self, routes, feed)
        actions = self.actions(routes)
        check_rows(self.topology, self.place, actions, run.num_rows)
        to_post = iter(actions)
        events: list[Event] = []
        for action in actions:
            start_s, waited_s, computed_s = time.monotonic(), self.wire.waited_s, run.computed_s
            for coming in islice(to_post, 1 if events else 2):  # one ahead
                run.post(coming)
            run.take(action)
            wait_s, compute_s = self.wire.waited_s - waited_s, run.computed_s - computed_s
            events.append(Event(self.place, action, start_s, time.monotonic(), wait_s, compute_s))
        self.wire.flush()
        self.recording = Recording(events, clock_origin_s())
        return run.totals

    def actions(self, routes: Routes) -> Sequence[Action]:
        """Of this process's stage, in order."""
        return actions_of(self.topology, routes, self.place.unit, self.place.replica)[self.place.stage]


class _Run:
    """A step in progress."""

    def __init__(self, executor: Executor, routes: Routes, feed: Feed) -> None:
        self.totals = Totals()
        self.computed_s = 0.0
        """By the stages, so far."""
        self._place, self._flow, self._learning = executor.place, executor.flow, executor.learning
        self._stages, self._wire, self._peers = executor.stages, executor.wire, executor.peers
        self._routes, self._feed, self._exchanges = routes, feed, executor.exchanges
        self._last = self._flow.num_parts - 1  # position
        # A portion goes by its number from here on.
        self._portions = routes.portions(self._place.unit, self._place.replica)
        self._by_kind = {
            Kind.FORWARD: _numbers(portion.forward for portion in self._portions),
            Kind.BACKWARD: _numbers(portion.backward for portion in self._portions),
        }
        self._by_kind[Kind.WEIGHT] = self._by_kind[Kind.BACKWARD]
        self._run = {Kind.FORWARD: self._run_forward, Kind.BACKWARD: self._run_backward, Kind.WEIGHT: self._run_weights}
        self._cargo: dict[int, _Cargo] = {}
        self._held: dict[tuple[int, int], _Held] = {}  # by portion and position
        self._puts_off = executor.topology.schedule == ZERO_BUBBLE
        self._weights: dict[int, Callable[[], None]] = {}  # by portion

    def num_rows(self, kind: Kind) -> dict[int, int]:
        """By the microbatch of such an action. Waits for the data of all portions."""
        return {
            microbatch: sum((self._cargo.get(portion) or self._load(portion)).num_rows for portion in portions)
            for microbatch, portions in self._by_kind[kind].items()
        }

    # -- actions ----------------------------------------------------------------------------------------------------

    def post(self, action: Action) -> None:
        """Make room for what an action is going to receive."""
        kind, position, stage = action.kind, self._position(action), self._stages[action.chunk]
        if kind == Kind.WEIGHT or (kind == Kind.BACKWARD and not self._flow.enters(position)):
            return
        for portion in self._portions_of(action):
            cargo = self._cargo.get(portion) or self._load(portion)
            at_end = position == (0 if kind == Kind.FORWARD else self._last)
            if at_end:
                for exchange in cargo.arriving if kind == Kind.FORWARD else cargo.leaving:
                    shape = exchange.num_rows, stage.width if kind == Kind.FORWARD else stage.token_width
                    self._wire.expect(shape, exchange.neighbours.source, _tag(kind, exchange.number))
            elif cargo.num_rows:
                before = position - 1 if kind == Kind.FORWARD else position + 1
                self._wire.expect((cargo.num_rows, stage.width), *self._link(kind, portion, position, before))

    def take(self, action: Action) -> None:
        """Run an action that was posted."""
        for portion in self._portions_of(action):
            self._run[action.kind](portion, self._stages[action.chunk], self._position(action))
            if action.kind == Kind.BACKWARD and action.chunk == 0:  # the last one to need them
                del self._cargo[portion]

    def _run_forward(self, portion: int, stage: Chunk, position: int) -> None:
        cargo = self._cargo[portion]
        if not cargo.num_rows:
            return
        hidden: Tensor | None = None
        arrived: list[Tensor] = []
        tokens: dict[str, Tensor] = {}
        if position > 0:
            hidden = self._wire.receive(*self._link(Kind.FORWARD, portion, position, position - 1))
            hidden.requires_grad_(self._flow.leaves(position))
        else:
            arrived = [
                self._receive(Kind.FORWARD, exchange).requires_grad_(exchange.unit in self._learning)
                for exchange in cargo.arriving
            ]
            tokens = in_order(cargo.arriving, arrived)
        began_s = time.monotonic()
        output = stage(cargo.data, hidden, tokens)
        self.computed_s += time.monotonic() - began_s
        if self._flow.enters(position):
            self._held[portion, position] = _Held(output, hidden, arrived)
        if output.loss is not None:
            self._count(output.loss, portion)
        if output.rows is not None and position < self._last:
            self._wire.send(output.rows, *self._link(Kind.FORWARD, portion, position, position + 1))
        elif output.rows is not None:
            for exchange in cargo.leaving:
                self._send(Kind.FORWARD, exchange, output.rows.detach()[exchange.rows])

    def _count(self, loss: StepLoss, portion: int) -> None:
        loss_sum = float(loss.loss_sum.detach())
        if not math.isfinite(loss_sum):
            self.totals.not_finite.extend(self._portions[portion].samples)
        self.totals.loss_sum += loss_sum
        self.totals.num_targets += loss.num_targets

    def _run_backward(self, portion: int, stage: Chunk, position: int) -> None:
        held = self._held.pop((portion, position), None)
        if held is None:
            return
        rows, loss = held.output.rows, held.output.loss
        ends: list[Tensor] = []
        gradients: list[Tensor | None] = []
        if loss is not None and loss.num_targets and loss.loss_sum.requires_grad:
            ends.append(loss.loss_sum)
            gradients.append(None)
        if rows is not None and len(rows):
            gradient = self._gradient(portion, position, rows).to(rows.dtype)
            if rows.requires_grad:  # not in a frozen LLM where the portion has no media
                ends.append(rows)
                gradients.append(gradient)
        began_s = time.monotonic()
        if ends:
            with torch.autocast(stage.device.type, enabled=False):  # a forward's dtypes are its backward's
                torch.autograd.backward(ends, gradients)
            if self._puts_off:
                self._weights[portion] = stage.put_off()
        self.computed_s += time.monotonic() - began_s
        if self._flow.leaves(position) and held.hidden is not None:
            self._wire.send(_gradient_of(held.hidden), *self._link(Kind.BACKWARD, portion, position, position - 1))
        for exchange, tensor in zip(self._cargo[portion].arriving, held.arrived, strict=False):  # none behind the first position
            if tensor.requires_grad:
                self._send(Kind.BACKWARD, exchange, _gradient_of(tensor))

    def _gradient(self, portion: int, position: int, output: Tensor) -> Tensor:
        if position < self._last:
            peer, tag = self._link(Kind.BACKWARD, portion, position, position + 1)
            _, of_forward = self._link(Kind.FORWARD, portion, position, position + 1)
            return self._wire.receive(peer, tag, answers=of_forward)
        gradient = torch.zeros_like(output)
        for exchange in self._cargo[portion].leaving:
            gradient[exchange.rows] = self._receive(Kind.BACKWARD, exchange).to(gradient.dtype)
        return gradient

    def _run_weights(self, portion: int, stage: Chunk, _: int) -> None:
        compute = self._weights.pop(portion, None)
        if compute is None:
            return
        began_s = time.monotonic()
        with torch.autocast(stage.device.type, enabled=False):
            compute()
        self.computed_s += time.monotonic() - began_s

    # -- messages ---------------------------------------------------------------------------------------------------

    def _receive(self, kind: Kind, exchange: Exchange) -> Tensor:
        answers = _tag(Kind.FORWARD, exchange.number) if kind == Kind.BACKWARD else None
        return self._wire.receive(exchange.neighbours.source, _tag(kind, exchange.number), answers=answers)

    def _send(self, kind: Kind, exchange: Exchange, rows: Tensor) -> None:
        for rank in exchange.neighbours.receivers:
            self._wire.send(rows, rank, _tag(kind, exchange.number))

    def _link(self, kind: Kind, portion: int, position: int, other: int) -> tuple[int, int]:
        """The process with the position in front of one or behind it, and the tag of what passes between the two."""
        number = portion * (self._last + 1) + min(position, other)
        return self._peers[other % len(self._peers)], _tag(kind, number)

    # -- places and data --------------------------------------------------------------------------------------------

    def _position(self, action: Action) -> int:
        return action.chunk * len(self._peers) + self._place.stage

    def _portions_of(self, action: Action) -> Sequence[int]:
        return self._by_kind[action.kind].get(action.microbatch, ())

    def _load(self, number: int) -> _Cargo:
        portion = self._portions[number]
        data = self._feed(portion)
        first, last = self._stages[0], self._stages[-1]
        num_rows = first.num_rows(data)
        arriving: Sequence[Exchange] = ()
        leaving: Sequence[Exchange] = ()
        if num_rows and self._place.stage == 0:
            handovers = self._routes.into(portion)
            units = {handover.source.unit for handover in handovers}
            ranges = {unit: row_ranges(data, first.tokens_of(unit, data)) for unit in units}
            arriving = self._exchanges.arriving(handovers, ranges)
        if num_rows and self._place.stage == len(self._peers) - 1 and (handovers := self._routes.out_of(portion)):
            leaving = self._exchanges.leaving(handovers, row_ranges(data, last.tokens(data)))
        cargo = self._cargo[number] = _Cargo(data, num_rows, arriving, leaving)
        return cargo


def _numbers(microbatches: Iterable[int]) -> dict[int, list[int]]:
    """By microbatch, from the microbatch of each portion."""
    grouped: dict[int, list[int]] = {}
    for number, microbatch in enumerate(microbatches):
        grouped.setdefault(microbatch, []).append(number)
    return grouped


def _tag(kind: Kind, number: int) -> int:
    """Of a message, among all that two processes exchange in a step: they are of one unit or of two, never both."""
    return 2 * number + kind


def _gradient_of(tensor: Tensor) -> Tensor:
    """Zeros where nothing behind it has a target."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
