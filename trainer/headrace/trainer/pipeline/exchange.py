"""What the processes of two units hand each other: which rows of a portion, and who sends them to whom."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from headrace.backward import in_front
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.pipeline.routes import Handover, Portion
from headrace.trainer.pipeline.topology import PipelineTopology, Place

Ranges = Mapping[int, range]
"""Where each sample's rows lie; what could not be decoded is not in it."""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The processes of a replica of another unit, as one process sees them."""

    source: int
    """Who sends to it: each TP slice receives from one of the other side's."""
    receivers: Sequence[int]
    """To whom it sends: those of the other side's TP slices that receive from this one."""


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """A handover with rows, as a process at one of its ends has it."""

    number: int
    """Of the handover."""
    unit: str
    """At the other end."""
    rows: slice | Tensor
    """Where they lie: behind a portion in its output, in front of it among all that it receives from that unit."""
    num_rows: int
    neighbours: Neighbours

    def is_all_of(self, output: Tensor) -> bool:
        """Whether it has every row of a portion's output, in order: then there is nothing to pick."""
        return isinstance(self.rows, slice) and self.num_rows == output.shape[0]


class Exchanges:
    """Of one process."""

    def __init__(self, topology: PipelineTopology, place: Place) -> None:
        self._neighbours = {
            (unit, replica): _neighbours(topology, place, unit, replica)
            for unit, size in topology.units.items()
            if unit != place.unit
            for replica in range(size.dp)
        }

    def arriving(self, handovers: Iterable[Handover], ranges: Mapping[str, Ranges]) -> list[Exchange]:
        """Of handovers into a portion. ranges: by unit in front, of the tokens that the portion takes from it."""
        return [
            exchange for handover in handovers for exchange in self._of(handover, handover.source, ranges[handover.source.unit])
        ]

    def leaving(self, handovers: Iterable[Handover], ranges: Ranges) -> list[Exchange]:
        """Of handovers out of a portion. ranges: of its output."""
        return [exchange for handover in handovers for exchange in self._of(handover, handover.target, ranges)]

    def _of(self, handover: Handover, other: Portion, ranges: Ranges) -> Iterator[Exchange]:
        """One; none where the handover carries nothing."""
        rows = [some for sample in handover.samples if (some := ranges.get(sample))]
        if rows:
            neighbours = self._neighbours[other.unit, other.replica]
            yield Exchange(handover.number, other.unit, _place(rows), sum(map(len, rows)), neighbours)


def _neighbours(topology: PipelineTopology, place: Place, unit: str, replica: int) -> Neighbours:
    own, other = topology.units[place.unit], topology.units[unit]
    stage = 0 if place.unit in in_front(unit, topology.units) else other.pp - 1
    ranks = [topology.rank(Place(unit, replica, stage, number)) for number in range(other.tp)]
    return Neighbours(ranks[place.slice % other.tp], ranks[place.slice :: own.tp])


def row_ranges(data: PackedMicrobatch, counts: Tensor) -> dict[int, range]:
    """From how many rows each sample has."""
    ranges, start = {}, 0
    for sample, count in zip(data.sample_ids.tolist(), counts.tolist(), strict=True):
        ranges[sample] = range(start, start + count)
        start += count
    return ranges


def in_order(arriving: Sequence[Exchange], arrived: Sequence[Tensor]) -> dict[str, Tensor]:
    """By unit in front, the rows of all its handovers in the order of the portion's samples."""
    pieces: dict[str, list[tuple[slice | Tensor, Tensor]]] = {}
    for exchange, tensor in zip(arriving, arrived, strict=True):
        pieces.setdefault(exchange.unit, []).append((exchange.rows, tensor))
    return {unit: _joined(of_unit) for unit, of_unit in pieces.items()}


def _joined(pieces: Sequence[tuple[slice | Tensor, Tensor]]) -> Tensor:
    if len(pieces) == 1 and isinstance(pieces[0][0], slice):
        return pieces[0][1]
    place = torch.cat([torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows for rows, _ in pieces])
    return torch.cat([tensor for _, tensor in pieces])[place.argsort()]


def _place(rows: Sequence[range]) -> slice | Tensor:
    """A slice where they follow each other, which takes no copy; else their indices."""
    if all(one.stop == other.start for one, other in pairwise(rows)):
        return slice(rows[0].start, rows[-1].stop)
    return torch.tensor([row for some in rows for row in some])
