"""A portion made ready for a process's stage: its inputs, and the rows that it exchanges with other units."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.loading.device_copy import to_device
from headrace.trainer.pipeline.chunk import Chunk, Inputs
from headrace.trainer.pipeline.gradient_flow import needs_output_gradient
from headrace.trainer.pipeline.routes import Portion, Routes
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from headrace.trainer.pipeline.unit_exchange import Exchange, Exchanges, Join, row_ranges


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cargo:
    """A portion as a process keeps it for all of its actions, with its tensors on the device."""

    inputs: Sequence[Inputs]
    """Of each of the process's chunks."""
    arriving: Sequence[Exchange] = ()
    """Exchanges with upstream units; empty except on the unit's first stage."""
    joins: Mapping[str, Join] = field(default_factory=dict)
    """How the slices of the stage join the rows that arrive, by upstream unit."""
    leaving: Sequence[Exchange] = ()
    """Exchanges with the downstream unit; empty except on the unit's last stage."""
    gradient_join: Join | None = None
    """How they join the gradient of what leaves; None where none comes back."""
    num_made: int = 0
    """Number of rows that the unit makes for the downstream unit; 0 except on the unit's last stage."""
    most_rows: int | None = None
    """`num_rows` of the place that has most, where several share the portion's sequences; None: all have as many."""

    @property
    def num_rows(self) -> int:
        """Number of rows of the portion's hidden states; 0 if the unit has nothing to do for the portion."""
        return self.inputs[0].num_rows


Feed = Callable[[Portion], Cargo]
"""A function that returns the cargo of a portion, on the device, without samples that failed to decode."""


class Prepare(Protocol):
    """Protocol of a function that makes the cargo of a portion: a `CargoMaker`."""

    def __call__(self, routes: Routes, portion: Portion, data: PackedMicrobatch) -> Cargo: ...


class CargoMaker:
    """Makes the cargo of portions for one process, on the host and from any thread: it reads nothing that a step changes."""

    def __init__(self, topology: PipelineTopology, place: Place, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        self._exchanges = Exchanges(topology, place)
        self._takes_gradients = needs_output_gradient(topology, place.unit)
        self._is_first = place.stage == 0
        self._is_last = place.stage == topology.units[place.unit].pp - 1

    def __call__(self, routes: Routes, portion: Portion, data: PackedMicrobatch) -> Cargo:
        """Return the cargo of a portion, from its unit's columns on the host."""
        inputs = [chunk.prepare(data) for chunk in self._chunks]
        if not inputs[0].num_rows:
            return Cargo(inputs=inputs)
        arriving, joins = self._arriving(routes, portion, data) if self._is_first else ((), {})
        leaving, gradient_join, made = self._leaving(routes, portion, data) if self._is_last else ((), None, 0)
        return Cargo(inputs=inputs, arriving=arriving, joins=joins, leaving=leaving, gradient_join=gradient_join, num_made=made)

    def feed(self, routes: Routes, data_of: Callable[[Portion], PackedMicrobatch]) -> Feed:
        """Return a feed of data that are on the host, which makes the cargo of a portion when the stage asks for it."""
        device = self._chunks[0].device
        return lambda portion: to_device(self(routes, portion, data_of(portion)), device)

    def _arriving(
        self, routes: Routes, portion: Portion, data: PackedMicrobatch
    ) -> tuple[Sequence[Exchange], Mapping[str, Join]]:
        handovers = routes.into(portion)
        units = {handover.source.unit for handover in handovers}
        ranges = {unit: row_ranges(data, self._chunks[0].input_token_counts(unit, data)) for unit in units}
        return self._exchanges.arriving(handovers, ranges)

    def _leaving(self, routes: Routes, portion: Portion, data: PackedMicrobatch) -> tuple[Sequence[Exchange], Join | None, int]:
        if not (handovers := routes.out_of(portion)):
            return (), None, 0
        counts = self._chunks[-1].token_counts(data)
        exchanges, joins = self._exchanges.leaving(handovers, row_ranges(data, counts))
        return exchanges, next(iter(joins.values()), None) if self._takes_gradients else None, int(counts.sum())
