"""One process's share of a step: the actions of its stage, in the schedule's order, and the messages around them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from headrace.trainer.pipeline.deadlock import actions_of, check_order, check_rows
from headrace.trainer.pipeline.events import Event, Recording, clock_origin_s
from headrace.trainer.pipeline.exchange import Exchange, Exchanges, in_order, row_ranges
from headrace.trainer.pipeline.flow import GradientFlow, learns
from headrace.trainer.pipeline.routes import Portion, Routes
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from headrace.trainer.pipeline.wire import Wire

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
    """What the executor needs of one chunk of a stage: a `headrace.trainer.pipeline.stage.Stage`, or what stands in its place."""

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


class _Cargo(NamedTuple):
    """A portion whose data are there, for all of its visits to this process."""

    data: PackedMicrobatch
    num_rows: int
    arriving: Sequence[Exchange]
    """Nothing but on the unit's first stage."""
    leaving: Sequence[Exchange]
    """Nothing but on its last one."""


class _Link(NamedTuple):
    """A message between two positions."""

    rank: int
    """Of the process at the other end."""
    tag: int


@dataclass(frozen=True, slots=True, eq=False)
class _Move:
    """What an action does with a portion. It is worked out before the step begins: between two computations, which leave nothing
    in the caches, the same takes several times as long.
    """

    kind: Kind
    portion: int
    stage: Chunk
    position: int
    source: _Link | None
    """Of what comes in from a position beside it; None at the unit's end, where it comes by exchanges."""
    target: _Link | None
    """Of what goes out."""
    width: int
    """Of what comes in."""
    enters: bool
    """Of `GradientFlow`, as the next one."""
    leaves: bool
    ends: bool
    """Whether nothing else needs the portion's cargo afterwards."""


class Executor:
    """The stages of one process: as many as the schedule has chunks."""

    def __init__(
        self,
        topology: PipelineTopology,
        place: Place,
        stages: Sequence[Chunk],
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
        wait: Callable[[dist.Work], object] = dist.Work.wait,
    ) -> None:
        """`dtype`: of what is sent. `group`: whose ranks are the topology's. None: all processes. `wait`: for what arrives."""
        self.topology = topology
        self.place = place
        self.stages = stages
        self.flow = GradientFlow.of(topology, place.unit)
        self.learning = {unit for unit in topology.units if learns(topology, unit)}
        self.exchanges = Exchanges(topology, place)
        self.peers = [topology.rank(replace(place, stage=stage)) for stage in range(topology.units[place.unit].pp)]
        """Who has the stages of this replica and TP slice."""
        self.wire = Wire(stages[0].device, dtype, group, wait)
        self.recording = Recording((), 0.0)
        """Of the last step."""

    def run(self, routes: Routes, feed: Feed) -> Totals:
        """Forward and backward of everything that the plan gives this process; gradients are added to its parameters'.

        What was sent may still be on its way until `wire.flush`.
        Raises HeadraceError, before anything is computed, where the plan would have somebody wait for ever, and UserError where
        this process would keep more rows than it may.
        """
        check_order(self.topology, routes, self.place)
        run = _Run(self, routes, feed)
        actions = self.actions(routes)
        check_rows(self.topology, self.place, actions, run.num_rows)
        moves = [run.moves(action) for action in actions]
        times: list[tuple[float, float, float, float]] = []
        for of_action, coming in pairwise([*moves, []]):
            start_s, waited_s, computed_s = time.monotonic(), self.wire.waited_s, run.computed_s
            if not times:
                run.post(of_action)
            run.post(coming)  # one ahead
            run.take(of_action)
            times.append((start_s, time.monotonic(), self.wire.waited_s - waited_s, run.computed_s - computed_s))
        events = [Event(self.place, action, *taken) for action, taken in zip(actions, times, strict=True)]
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
        self._is_first, self._is_last = self._place.stage == 0, self._place.stage == len(self._peers) - 1
        # A portion goes by its number from here on.
        self._portions = routes.portions(self._place.unit, self._place.replica)
        self._by_kind = {
            Kind.FORWARD: _numbers(portion.forward for portion in self._portions),
            Kind.BACKWARD: _numbers(portion.backward for portion in self._portions),
        }
        self._by_kind[Kind.WEIGHT] = self._by_kind[Kind.BACKWARD]
        self._cargo: dict[int, _Cargo] = {}
        self._held: dict[tuple[int, int], _Held] = {}  # by portion and position
        self._autocasts = torch.is_autocast_enabled(self._stages[0].device.type)
        self._puts_off = executor.topology.schedule == ZERO_BUBBLE
        self._weights: dict[int, Callable[[], None]] = {}  # by portion

    def num_rows(self, kind: Kind) -> dict[int, int]:
        """By the microbatch of such an action. Waits for the data of all portions."""
        return {
            microbatch: sum((self._cargo.get(portion) or self._load(portion)).num_rows for portion in portions)
            for microbatch, portions in self._by_kind[kind].items()
        }

    # -- before the step --------------------------------------------------------------------------------------------

    def moves(self, action: Action) -> list[_Move]:
        """With all portions of an action."""
        position = action.chunk * len(self._peers) + self._place.stage
        before, behind = position - 1, position + 1
        source, target = (behind, before) if action.kind == Kind.BACKWARD else (before, behind)
        stage = self._stages[action.chunk]
        return [
            _Move(
                kind=action.kind,
                portion=portion,
                stage=stage,
                position=position,
                source=self._link(action.kind, portion, position, source),
                target=self._link(action.kind, portion, position, target),
                width=stage.token_width if source > self._last else stage.width,
                enters=self._flow.enters(position),
                leaves=self._flow.leaves(position),
                ends=action.kind == Kind.BACKWARD and action.chunk == 0,
            )
            for portion in self._by_kind[action.kind].get(action.microbatch, ())
        ]

    def _link(self, kind: Kind, portion: int, position: int, other: int) -> _Link | None:
        """Between a position here and one beside it."""
        if not 0 <= other <= self._last:
            return None
        number = portion * (self._last + 1) + min(position, other)
        return _Link(self._peers[other % len(self._peers)], _tag(kind, number))

    # -- actions ----------------------------------------------------------------------------------------------------

    def post(self, moves: Sequence[_Move]) -> None:
        """Make room for what an action is going to receive."""
        for move in moves:
            is_forward = move.kind == Kind.FORWARD
            if not is_forward and (move.kind == Kind.WEIGHT or not move.enters):
                return
            cargo = self._cargo.get(move.portion) or self._load(move.portion)
            if move.source is not None:
                if cargo.num_rows:
                    self._wire.expect((cargo.num_rows, move.width), *move.source, learns=is_forward and move.leaves)
                continue
            for exchange in cargo.arriving if is_forward else cargo.leaving:
                learns = is_forward and exchange.unit in self._learning
                source, tag = exchange.neighbours.source, _tag(move.kind, exchange.number)
                self._wire.expect((exchange.num_rows, move.width), source, tag, learns=learns)

    def take(self, moves: Sequence[_Move]) -> None:
        """Run an action that was posted."""
        for move in moves:
            _RUN[move.kind](self, move)
            if move.ends:
                del self._cargo[move.portion]

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
        began_s = time.monotonic()
        output = move.stage(cargo.data, hidden, tokens)
        self.computed_s += time.monotonic() - began_s
        if move.enters:
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
            self.totals.not_finite.extend(self._portions[portion].samples)
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
            if rows.requires_grad:  # not in a frozen LLM where the portion has no media
                ends.append(rows)
                gradients.append(gradient if gradient.dtype is rows.dtype else gradient.to(rows.dtype))
        began_s = time.monotonic()
        if ends:
            with self._as_in_forward():
                torch.autograd.backward(ends, gradients)
            if self._puts_off:
                self._weights[move.portion] = move.stage.put_off()
        self.computed_s += time.monotonic() - began_s
        if move.leaves and move.target is not None and held.hidden is not None:
            self._wire.send(_gradient_of(held.hidden), *move.target)
        arriving = self._cargo[move.portion].arriving
        for exchange, tensor in zip(arriving, held.arrived, strict=False):  # nothing arrived behind the first position
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
        compute = self._weights.pop(move.portion, None)
        if compute is None:
            return
        began_s = time.monotonic()
        with self._as_in_forward():
            compute()
        self.computed_s += time.monotonic() - began_s

    def _as_in_forward(self) -> AbstractContextManager[object]:
        """Around a backward: its dtypes are those of its forward."""
        return torch.autocast(self._stages[0].device.type, enabled=False) if self._autocasts else nullcontext()

    # -- messages ---------------------------------------------------------------------------------------------------

    def _receive(self, kind: Kind, exchange: Exchange) -> Tensor:
        return self._wire.receive(exchange.neighbours.source, _tag(kind, exchange.number))

    def _send(self, kind: Kind, exchange: Exchange, rows: Tensor) -> None:
        for rank in exchange.neighbours.receivers:
            self._wire.send(rows, rank, _tag(kind, exchange.number))

    # -- data -----------------------------------------------------------------------------------------------------------

    def _load(self, number: int) -> _Cargo:
        data = self._feed(self._portions[number])
        num_rows = self._stages[0].num_rows(data)
        arriving = self._arriving(number, data) if num_rows and self._is_first else ()
        leaving = self._leaving(number, data) if num_rows and self._is_last else ()
        cargo = self._cargo[number] = _Cargo(data, num_rows, arriving, leaving)
        return cargo

    def _arriving(self, number: int, data: PackedMicrobatch) -> Sequence[Exchange]:
        handovers = self._routes.into(self._portions[number])
        units = {handover.source.unit for handover in handovers}
        ranges = {unit: row_ranges(data, self._stages[0].tokens_of(unit, data)) for unit in units}
        return self._exchanges.arriving(handovers, ranges)

    def _leaving(self, number: int, data: PackedMicrobatch) -> Sequence[Exchange]:
        handovers = self._routes.out_of(self._portions[number])
        return self._exchanges.leaving(handovers, row_ranges(data, self._stages[-1].tokens(data))) if handovers else ()


_RUN = {Kind.FORWARD: _Run._run_forward, Kind.BACKWARD: _Run._run_backward, Kind.WEIGHT: _Run._run_weights}
"""Not bound: a run that held its own methods would keep a lost generation's connections until Python looks for cycles."""


def _numbers(microbatches: Iterable[int]) -> dict[int, list[int]]:
    """By microbatch, from the microbatch of each portion."""
    grouped: dict[int, list[int]] = {}
    for number, microbatch in enumerate(microbatches):
        grouped.setdefault(microbatch, []).append(number)
    return grouped


def _tag(kind: Kind, number: int) -> int:
    """Of a message, among all that two processes exchange in a step: they are of one unit or of two, never both. Gradients have
    the odd one behind that of what they answer (see `Wire`).
    """
    return 2 * number + kind


def _gradient_of(tensor: Tensor) -> Tensor:
    """Zeros where nothing behind it has a target."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
