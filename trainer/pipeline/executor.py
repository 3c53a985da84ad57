"""One process's share of a step: the actions of its stage, in the schedule's order, and the messages around them."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.schedule import Action, Kind
from trainer.collate import PackedMicrobatch
from trainer.models.loss import StepLoss
from trainer.pipeline.events import Event, Recording, clock_origin_s
from trainer.pipeline.flow import GradientFlow, learns
from trainer.pipeline.order import actions_of, check_order
from trainer.pipeline.routes import Handover, Portion, Routes
from trainer.pipeline.topology import PipelineTopology, Place
from trainer.pipeline.wire import Arrival, Wire

Feed = Callable[[Portion], PackedMicrobatch]
"""The columns of a unit that a portion's samples have, on the device; fewer samples where some could not be decoded."""

_Key = tuple[Portion | Handover, int]
"""A portion with the position that it comes from or, on its way back, goes to; or a handover with -1."""


class Chunk(Protocol):
    """What the executor needs of one chunk of a stage: a `trainer.pipeline.stages.Stage`, or what stands in its place."""

    @property
    def device(self) -> torch.device: ...
    @property
    def width(self) -> int: ...
    @property
    def token_width(self) -> int: ...
    def num_rows(self, data: PackedMicrobatch) -> int: ...
    def tokens(self, data: PackedMicrobatch) -> Tensor: ...
    def tokens_of(self, unit: str, data: PackedMicrobatch) -> Tensor: ...
    def __call__(self, data: PackedMicrobatch, hidden: Tensor | None, arrived: Mapping[str, Tensor]) -> Any:
        """A Tensor, or at the very end a StepLoss, that leads back to what came in by autograd."""


@dataclass(slots=True)
class Totals:
    """What a process has computed of a step's loss; nothing but on the last stage."""

    loss_sum: float = 0.0
    num_targets: int = 0
    not_finite: list[int] = field(default_factory=list)
    """Samples of portions whose loss is no number."""


@dataclass(slots=True, eq=False)
class _Held:
    """What a position keeps of a portion between forward and backward."""

    output: Tensor | StepLoss
    hidden: Tensor | None = None
    arrived: dict[Handover, Tensor] = field(default_factory=dict)


class Executor:
    """The stages of one process: as many as the schedule has chunks."""

    def __init__(self, topology: PipelineTopology, place: Place, stages: Sequence[Chunk], dtype: torch.dtype) -> None:
        """`dtype`: of what is sent."""
        self.topology = topology
        self.place = place
        self.stages = stages
        self.flow = GradientFlow.of(topology, place.unit)
        self.peers = [topology.rank(replace(place, stage=stage)) for stage in range(topology.units[place.unit].pp)]
        """Who has the stages of this replica and TP slice."""
        self.wire = Wire(stages[0].device, dtype)
        self.recording = Recording((), 0.0)
        """Of the last step."""

    def run(self, routes: Routes, feed: Feed) -> Totals:
        """Forward and backward of everything that the plan gives this process; gradients are added to its parameters'.

        Raises HeadraceError, before anything is computed, where the plan would have somebody wait for ever.
        """
        check_order(self.topology, routes, self.place)
        run = _Run(self, routes, feed)
        actions = self.actions(routes)
        events: list[Event] = []
        for number, action in enumerate(actions):
            start_s, waited_s, computed_s = time.monotonic(), self.wire.waited_s, run.computed_s
            for coming in actions[number : number + 2]:
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
        self._topology, self._place, self._flow = executor.topology, executor.place, executor.flow
        self._stages, self._wire, self._peers = executor.stages, executor.wire, executor.peers
        self._routes, self._feed = routes, feed
        portions = routes.portions(self._place.unit, self._place.replica)
        self._forward = _by(portions, lambda portion: portion.forward)
        self._backward = _by(portions, lambda portion: portion.backward)
        self._number = {portion: number for number, portion in enumerate(portions)}
        self._handover_number = {handover: number for number, handover in enumerate(routes.handovers)}
        self._data: dict[Portion, PackedMicrobatch] = {}
        self._visits: Counter[Portion] = Counter()
        self._posted: dict[tuple[Kind, _Key], Arrival] = {}
        self._done: set[Action] = set()
        self._held: dict[tuple[Portion, int], _Held] = {}

    # -- actions ----------------------------------------------------------------------------------------------------

    def post(self, action: Action) -> None:
        """Make room for what an action is going to receive, once."""
        if action in self._done:
            return
        self._done.add(action)
        position = self._position(action)
        for portion in self._portions(action):
            data = self._data_of(portion)
            stage = self._stages[action.chunk]
            if not stage.num_rows(data):
                continue
            if action.kind == Kind.FORWARD and position > 0:
                self._expect(action.kind, (portion, position - 1), (stage.num_rows(data), stage.width), self._peer(position - 1))
            elif action.kind == Kind.FORWARD:
                for handover, counts in self._arriving(portion, stage, data):
                    self._expect_tokens(action.kind, handover, counts, self._neighbour(handover.source, last=True))
            elif self._flow.enters(position) and position < self._last:
                self._expect(action.kind, (portion, position), (stage.num_rows(data), stage.width), self._peer(position + 1))
            elif self._flow.enters(position):
                for handover, counts in self._leaving(portion, stage, data):
                    self._expect_tokens(action.kind, handover, counts, self._neighbour(handover.target, last=False))

    def take(self, action: Action) -> None:
        """Run an action that was posted."""
        run = self._run_forward if action.kind == Kind.FORWARD else self._run_backward
        for portion in self._portions(action):
            run(portion, self._stages[action.chunk], self._position(action))
            self._visits[portion] += 1
            if self._visits[portion] == 2 * len(self._stages):
                del self._data[portion]

    def _run_forward(self, portion: Portion, stage: Chunk, position: int) -> None:
        data = self._data_of(portion)
        if not stage.num_rows(data):
            return
        held = _Held(output=torch.empty(0))
        tokens: dict[str, Tensor] = {}
        if position > 0:
            held.hidden = self._posted.pop((Kind.FORWARD, (portion, position - 1)))().requires_grad_(self._flow.leaves(position))
        else:
            arriving = list(self._arriving(portion, stage, data))
            for handover, _ in arriving:
                tensor = self._posted.pop((Kind.FORWARD, (handover, -1)))()
                held.arrived[handover] = tensor.requires_grad_(learns(self._topology, handover.source.unit))
            tokens = _in_order(arriving, held.arrived)
        began_s = time.monotonic()
        held.output = stage(data, held.hidden, tokens)
        self.computed_s += time.monotonic() - began_s
        if self._flow.enters(position):
            self._held[portion, position] = held
        if isinstance(held.output, StepLoss):
            loss_sum = float(held.output.loss_sum.detach())
            if not math.isfinite(loss_sum):
                self.totals.not_finite.extend(portion.samples)
            self.totals.loss_sum += loss_sum
            self.totals.num_targets += held.output.num_targets
        elif position < self._last:
            self._send(Kind.FORWARD, (portion, position), held.output, [self._peer(position + 1)])
        else:
            for handover, counts in self._leaving(portion, stage, data):
                rows = held.output.detach()[_rows(handover.samples, counts)]
                self._send(Kind.FORWARD, (handover, -1), rows, self._receivers(handover.target, last=False))

    def _run_backward(self, portion: Portion, stage: Chunk, position: int) -> None:
        held = self._held.pop((portion, position), None)
        if held is None:
            return
        output = held.output
        gradient = None if isinstance(output, StepLoss) else self._gradient(portion, stage, position, output)
        began_s = time.monotonic()
        with torch.autocast(stage.device.type, enabled=False):  # a forward's dtypes are its backward's
            if isinstance(output, StepLoss):
                if output.num_targets and output.loss_sum.requires_grad:
                    output.loss_sum.backward()  # type: ignore[no-untyped-call]
            elif gradient is not None and output.requires_grad:  # not in a frozen LLM where the portion has no media
                output.backward(gradient.to(output.dtype))  # type: ignore[no-untyped-call]
        self.computed_s += time.monotonic() - began_s
        if self._flow.leaves(position) and held.hidden is not None:
            self._send(Kind.BACKWARD, (portion, position - 1), _gradient_of(held.hidden), [self._peer(position - 1)])
        for handover, tensor in held.arrived.items():
            if tensor.requires_grad:
                receivers = self._receivers(handover.source, last=True)
                self._send(Kind.BACKWARD, (handover, -1), _gradient_of(tensor), receivers)

    def _gradient(self, portion: Portion, stage: Chunk, position: int, output: Tensor) -> Tensor:
        if position < self._last:
            return self._posted.pop((Kind.BACKWARD, (portion, position)))()
        gradient = torch.zeros_like(output)
        for handover, counts in self._leaving(portion, stage, self._data_of(portion)):
            gradient[_rows(handover.samples, counts)] = self._posted.pop((Kind.BACKWARD, (handover, -1)))().to(gradient.dtype)
        return gradient

    # -- what is handed over ----------------------------------------------------------------------------------------

    def _arriving(self, portion: Portion, stage: Chunk, data: PackedMicrobatch) -> Iterable[tuple[Handover, dict[int, range]]]:
        """Handovers into a portion that carry tokens, with the rows of the portion's tokens of that unit that each sample has."""
        for handover in self._routes.into(portion):
            rows = _ranges(data, stage.tokens_of(handover.source.unit, data))
            if _count(handover, rows):
                yield handover, rows

    def _leaving(self, portion: Portion, stage: Chunk, data: PackedMicrobatch) -> Iterable[tuple[Handover, dict[int, range]]]:
        """Handovers out of a portion that carry tokens, with the rows of the stage's output that each sample has."""
        handovers = self._routes.out_of(portion)
        rows = _ranges(data, stage.tokens(data)) if handovers else {}
        for handover in handovers:
            if _count(handover, rows):
                yield handover, rows

    def _expect_tokens(self, kind: Kind, handover: Handover, rows: Mapping[int, range], source: int) -> None:
        self._expect(kind, (handover, -1), (_count(handover, rows), self._stages[0].token_width), source)

    # -- messages ---------------------------------------------------------------------------------------------------

    def _expect(self, kind: Kind, key: _Key, shape: tuple[int, int], source: int) -> None:
        self._posted[kind, key] = self._wire.expect(shape, source, self._tag(kind, key))

    def _send(self, kind: Kind, key: _Key, tensor: Tensor, receivers: Iterable[int]) -> None:
        for rank in receivers:
            self._wire.send(tensor, rank, self._tag(kind, key))

    def _tag(self, kind: Kind, key: _Key) -> int:
        """Of a message, among all that two processes exchange in a step; processes of one unit or of two, never both."""
        what, position = key
        if isinstance(what, Handover):
            return 2 * self._handover_number[what] + kind
        return 2 * (self._number[what] * (self._last + 1) + position) + kind

    def _peer(self, position: int) -> int:
        """The process that has a position of this replica and TP slice."""
        return self._peers[position % len(self._peers)]

    def _neighbour(self, portion: Portion, *, last: bool) -> int:
        """The process of another unit from which this one receives: each TP slice from one of the other side's."""
        unit = self._topology.units[portion.unit]
        return self._topology.rank(Place(portion.unit, portion.replica, unit.pp - 1 if last else 0, self._place.slice % unit.tp))

    def _receivers(self, portion: Portion, *, last: bool) -> list[int]:
        """The processes of another unit that receive from this TP slice."""
        unit, own = self._topology.units[portion.unit], self._topology.units[self._place.unit]
        slices = range(self._place.slice, unit.tp, own.tp)
        stage = unit.pp - 1 if last else 0
        return [self._topology.rank(Place(portion.unit, portion.replica, stage, number)) for number in slices]

    # -- places -----------------------------------------------------------------------------------------------------

    @property
    def _last(self) -> int:
        """The unit's last position."""
        return self._flow.num_parts - 1

    def _position(self, action: Action) -> int:
        return action.chunk * self._topology.units[self._place.unit].pp + self._place.stage

    def _portions(self, action: Action) -> Sequence[Portion]:
        return (self._forward if action.kind == Kind.FORWARD else self._backward).get(action.microbatch, ())

    def _data_of(self, portion: Portion) -> PackedMicrobatch:
        if portion not in self._data:
            self._data[portion] = self._feed(portion)
        return self._data[portion]


def _by(portions: Sequence[Portion], key: Callable[[Portion], int]) -> dict[int, list[Portion]]:
    grouped: dict[int, list[Portion]] = {}
    for portion in portions:
        grouped.setdefault(key(portion), []).append(portion)
    return grouped


def _ranges(data: PackedMicrobatch, counts: Tensor) -> dict[int, range]:
    """Where each sample's rows lie, from how many it has."""
    ranges, start = {}, 0
    for sample, count in zip(data.sample_ids.tolist(), counts.tolist(), strict=True):
        ranges[sample] = range(start, start + count)
        start += count
    return ranges


def _rows(samples: Iterable[int], ranges: Mapping[int, range]) -> Tensor:
    """Indices of the rows of these samples; what could not be decoded has none."""
    return torch.tensor([row for sample in samples for row in ranges.get(sample, ())], dtype=torch.long)


def _count(handover: Handover, ranges: Mapping[int, range]) -> int:
    return sum(len(ranges.get(sample, ())) for sample in handover.samples)


def _in_order(arriving: Sequence[tuple[Handover, Mapping[int, range]]], arrived: Mapping[Handover, Tensor]) -> dict[str, Tensor]:
    """Of each encoder, the tokens of all handovers in the order of the portion's samples."""
    tokens = {}
    for unit in {handover.source.unit for handover, _ in arriving}:
        handovers = [(handover, ranges) for handover, ranges in arriving if handover.source.unit == unit]
        joined = torch.cat([arrived[handover] for handover, _ in handovers])
        place = torch.cat([_rows(handover.samples, ranges) for handover, ranges in handovers])
        tokens[unit] = joined if torch.equal(place, torch.arange(len(place))) else joined[place.argsort()]
    return tokens


def _gradient_of(tensor: Tensor) -> Tensor:
    """Zeros where nothing behind it has a target."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
