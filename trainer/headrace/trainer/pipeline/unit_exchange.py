"""What the places of two units send each other: which rows of a portion, and from which place to which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from headrace.backward_factors import in_front
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.pipeline.routes import Handover, Portion
from headrace.trainer.pipeline.topology import PipelineTopology, Place

Ranges = Mapping[int, range]
"""The rows of each sample in a tensor, by sample ID; samples that could not be decoded are left out."""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The places of one replica of another unit, by number, that a place receives from and sends to."""

    source: int
    """What sends to this place: each TP slice receives from one TP slice of the other side."""
    receivers: Sequence[int]
    """What this place sends to: the TP slices of the other side that receive from this one."""


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """A handover that carries rows, from the view of a place at one of its ends."""

    number: int
    """The handover's number within the step."""
    unit: str
    """The unit at the other end."""
    rows: slice | Tensor
    """Index of the rows: in the portion's output if it sends them, else among all rows that it receives from that unit."""
    num_rows: int
    neighbours: Neighbours

    def is_all_of(self, output: Tensor) -> bool:
        """Whether the exchange has every row of a portion's output, in order, so that no rows have to be picked."""
        return isinstance(self.rows, slice) and self.num_rows == output.shape[0]


class Exchanges:
    """Makes the exchanges of one place from the handovers of its portions."""

    def __init__(self, topology: PipelineTopology, place: Place) -> None:
        self._neighbours = {
            (unit, replica): _neighbours(topology, place, unit, replica)
            for unit, size in topology.units.items()
            if unit != place.unit
            for replica in range(size.dp)
        }

    def arriving(self, handovers: Iterable[Handover], ranges: Mapping[str, Ranges]) -> list[Exchange]:
        """Return the exchanges of handovers into a portion, for those that carry rows.

        ranges: by upstream unit, each sample's rows among the tokens that the portion takes from that unit.
        """
        return [
            exchange for handover in handovers for exchange in self._of(handover, handover.source, ranges[handover.source.unit])
        ]

    def leaving(self, handovers: Iterable[Handover], ranges: Ranges) -> list[Exchange]:
        """Return the exchanges of handovers out of a portion, for those that carry rows. ranges: the rows of its output."""
        return [exchange for handover in handovers for exchange in self._of(handover, handover.target, ranges)]

    def _of(self, handover: Handover, other: Portion, ranges: Ranges) -> Iterator[Exchange]:
        """Yield the exchange of a handover, or nothing if the handover carries no rows."""
        rows = [some for sample in handover.samples if (some := ranges.get(sample))]
        if rows:
            neighbours = self._neighbours[other.unit, other.replica]
            yield Exchange(handover.number, other.unit, _row_index(rows), sum(map(len, rows)), neighbours)


def _neighbours(topology: PipelineTopology, place: Place, unit: str, replica: int) -> Neighbours:
    own, other = topology.units[place.unit], topology.units[unit]
    stage = 0 if place.unit in in_front(unit, topology.units) else other.pp - 1
    slices = [topology.number(Place(unit, replica, stage, index)) for index in range(other.tp)]
    return Neighbours(slices[place.slice % other.tp], slices[place.slice :: own.tp])


def row_ranges(data: PackedMicrobatch, counts: Tensor) -> dict[int, range]:
    """Return the rows of each sample of a portion. counts: (n,) number of rows of each sample."""
    ranges, start = {}, 0
    for sample, count in zip(data.sample_ids.tolist(), counts.tolist(), strict=True):
        ranges[sample] = range(start, start + count)
        start += count
    return ranges


def orders_of(arriving: Sequence[Exchange]) -> dict[str, Tensor | None]:
    """Return, by upstream unit, the indices (t,) that bring its rows from the order in which they are joined into that of the
    portion's samples, on the host; None where it is the same order.
    """
    rows: dict[str, list[slice | Tensor]] = {}
    for exchange in arriving:
        rows.setdefault(exchange.unit, []).append(exchange.rows)
    return {unit: _order(of_unit) for unit, of_unit in rows.items()}


def _order(rows: Sequence[slice | Tensor]) -> Tensor | None:
    if len(rows) == 1 and isinstance(rows[0], slice):
        return None
    return torch.cat([torch.arange(some.start, some.stop) if isinstance(some, slice) else some for some in rows]).argsort()


def in_order(arriving: Sequence[Exchange], arrived: Sequence[Tensor], orders: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return, by upstream unit, the rows that arrived from it, joined in the order of the portion's samples.

    `orders`: from `orders_of`, on the device.
    """
    pieces: dict[str, list[Tensor]] = {}
    for exchange, tensor in zip(arriving, arrived, strict=True):
        pieces.setdefault(exchange.unit, []).append(tensor)
    return {
        unit: of_unit[0] if (order := orders[unit]) is None else torch.cat(of_unit)[order] for unit, of_unit in pieces.items()
    }


def _row_index(rows: Sequence[range]) -> slice | Tensor:
    """Return a slice if the ranges are adjacent, as indexing with it makes no copy; else the indices of the rows."""
    if all(one.stop == other.start for one, other in pairwise(rows)):
        return slice(rows[0].start, rows[-1].stop)
    return torch.tensor([row for some in rows for row in some])
