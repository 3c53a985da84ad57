"""What the places of two units send each other: which rows of a portion, and from which place to which.

Where units are cut into TP slices, a row crosses from one unit to the other once, and its gradient comes back the same way: the
rows of every handover are dealt to the slices of both sides in equal shares (`slice_pairs`), and the slices of a stage, which are
close to each other, gather what they have received. So do Narayanan et al. (2021, section 4.1) between stages. Shares go by the
number of a row in its handover, which both sides know: which row of the LLM a token belongs to the encoder does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from headrace.backward_factors import in_front
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.pipeline.channels import slice_pairs
from headrace.trainer.pipeline.routes import Handover, Portion
from headrace.trainer.pipeline.topology import PipelineTopology, Place

Ranges = Mapping[int, range]
"""The rows of each sample in a tensor, by sample ID; samples that could not be decoded are left out."""


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """A share of the rows of a handover, from the view of the place at one of its ends."""

    number: int
    """The handover's number within the step."""
    unit: str
    """The unit at the other end."""
    rows: slice | Tensor
    """Index of the rows: in the portion's output if it sends them, else among all rows that it receives from that unit."""
    num_rows: int
    peer: int
    """The place at the other end, by number."""

    def is_all_of(self, output: Tensor) -> bool:
        """Whether the exchange has every row of a portion's output, in order, so that no rows have to be picked."""
        return isinstance(self.rows, slice) and self.num_rows == output.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class Join:
    """How the slices of a stage join the rows that they receive from one other unit for a portion."""

    num_rows: int
    """Number of rows behind the join: those that all slices receive. Where ranks share sequences, on FSDP ranks those of this
    rank's tokens, and in pipelines what the tensor-parallel slices with the same part of these receive, padding included."""
    num_own: int
    """Number of rows, with padding behind them, that each slice contributes."""
    order: Tensor | None
    """(num_rows,) int64: the index of each row where the contributions of all slices follow each other; None: they are the first
    ones, in order."""


class Exchanges:
    """Makes the exchanges of one place from the handovers of its portions."""

    def __init__(self, topology: PipelineTopology, place: Place) -> None:
        self._slice = place.slice
        self._num_slices = topology.units[place.unit].num_slices
        self._ends = {
            (unit, replica): _ends(topology, place, unit, replica)
            for unit, size in topology.units.items()
            if unit != place.unit
            for replica in range(size.dp)
        }

    def arriving(
        self, handovers: Iterable[Handover], ranges: Mapping[str, Ranges]
    ) -> tuple[Sequence[Exchange], Mapping[str, Join]]:
        """Return this place's exchanges of handovers into a portion, and by upstream unit how the slices join the rows.

        ranges: by upstream unit, each sample's rows among the tokens that the portion takes from that unit.
        """
        return self._of((handover, handover.source, ranges[handover.source.unit]) for handover in handovers)

    def leaving(self, handovers: Iterable[Handover], ranges: Ranges) -> tuple[Sequence[Exchange], Mapping[str, Join]]:
        """Return this place's exchanges of handovers out of a portion, and, by the downstream unit, how the slices join the
        gradients that come back. ranges: the rows of the portion's output.
        """
        return self._of((handover, handover.target, ranges) for handover in handovers)

    def _of(self, handovers: Iterable[tuple[Handover, Portion, Ranges]]) -> tuple[Sequence[Exchange], Mapping[str, Join]]:
        of_slices: dict[str, list[list[Exchange]]] = {}  # by the other unit, also where this slice receives nothing
        for handover, other, ranges in handovers:
            for number, exchange in self._shares(handover, other, ranges):
                of_slices.setdefault(other.unit, [[] for _ in range(self._num_slices)])[number].append(exchange)
        own = [exchange for by_slice in of_slices.values() for exchange in by_slice[self._slice]]
        return own, {unit: _join(some) for unit, some in of_slices.items()}

    def _shares(self, handover: Handover, other: Portion, ranges: Ranges) -> Iterator[tuple[int, Exchange]]:
        """Yield the shares of a handover's rows that are not empty, each with the slice of this stage whose share it is."""
        rows = [some for sample in handover.samples if (some := ranges.get(sample))]
        if not rows:
            return
        ends = self._ends[other.unit, other.replica]
        index, num_rows = _row_index(rows), sum(map(len, rows))
        share = -(-num_rows // len(ends))
        for first, (number, peer) in zip(range(0, num_rows, share), ends, strict=False):
            last = min(first + share, num_rows)
            yield number, Exchange(handover.number, other.unit, _part(index, first, last), last - first, peer)


def _ends(topology: PipelineTopology, place: Place, unit: str, replica: int) -> list[tuple[int, int]]:
    """Return, for each share of the rows that a stage exchanges with a replica of another unit, the stage's slice and the number
    of the place at the other end."""
    own, other = topology.units[place.unit].num_slices, topology.units[unit]
    receives = unit in in_front(place.unit, topology.units)
    stage = other.pp - 1 if receives else 0
    slices = [topology.number(Place(unit, replica, stage, index)) for index in range(other.num_slices)]
    if receives:
        return [(receiver, slices[sender]) for sender, receiver in slice_pairs(len(slices), own)]
    return [(sender, slices[receiver]) for sender, receiver in slice_pairs(own, len(slices))]


def row_ranges(data: PackedMicrobatch, counts: Tensor) -> dict[int, range]:
    """Return the rows of each sample of a portion. counts: (n,) number of rows of each sample."""
    ranges, start = {}, 0
    for sample, count in zip(data.sample_ids.tolist(), counts.tolist(), strict=True):
        ranges[sample] = range(start, start + count)
        start += count
    return ranges


def joined(own: Sequence[Tensor], join: Join, gather: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the rows (`num_rows`, width) behind a join, in order, from those that this slice received.

    own: at least one tensor, if only an empty one. join: on the device. gather: returns the contributions of the slices that
    join them in a row, from that of this one.
    """
    num_missing = join.num_own - sum(map(len, own))
    if num_missing:
        own = [*own, own[0].new_zeros(num_missing, own[0].shape[1])]
    whole = gather(own[0] if len(own) == 1 else torch.cat(list(own)))
    return whole[: join.num_rows] if join.order is None else whole[join.order]


def _join(of_slices: Sequence[Sequence[Exchange]]) -> Join:
    num_own = max(sum(exchange.num_rows for exchange in of_slice) for of_slice in of_slices)
    rows, places = [], []
    for number, of_slice in enumerate(of_slices):
        place = number * num_own
        for exchange in of_slice:
            some = exchange.rows
            rows.append(torch.arange(some.start, some.stop) if isinstance(some, slice) else some)
            places.append(torch.arange(place, place + exchange.num_rows))
            place += exchange.num_rows
    order = torch.cat(places)[torch.cat(rows).argsort()]
    in_order = torch.equal(order, torch.arange(len(order)))
    return Join(num_rows=len(order), num_own=num_own, order=None if in_order else order)


def _row_index(rows: Sequence[range]) -> slice | Tensor:
    """Return a slice if the ranges are adjacent, as indexing with it makes no copy; else the indices of the rows."""
    if all(one.stop == other.start for one, other in pairwise(rows)):
        return slice(rows[0].start, rows[-1].stop)
    return torch.tensor([row for some in rows for row in some])


def _part(rows: slice | Tensor, first: int, last: int) -> slice | Tensor:
    """Return the index of some of the rows that `rows` is the index of."""
    return slice(rows.start + first, rows.start + last) if isinstance(rows, slice) else rows[first:last]
