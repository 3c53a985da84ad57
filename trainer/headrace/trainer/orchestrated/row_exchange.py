"""The exchange behind an encoder: what it makes of samples goes to the ranks that have these samples in the LLM.

It is one all-to-all with variable splits, and its transpose in the backward. The splits follow from the plan and the samples'
own sizes, which both sides know: no lengths are exchanged, and a sample that could not be decoded has no rows on either side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.trainer.pipeline.cargo import Cargo
from headrace.trainer.pipeline.unit_exchange import Exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """How many rows this rank sends to each rank of the group, and how many it receives from each, in the ranks' order."""

    sent: tuple[int, ...]
    received: tuple[int, ...]

    @classmethod
    def of(cls, unit: str, leaving: Cargo | None, arriving: Cargo | None, num_ranks: int) -> Self:
        """Return the splits of one encoder in one microbatch.

        leaving: what this rank has of the encoder; arriving: what it has of the LLM. None: no sample.
        """
        sent, received = [0] * num_ranks, [0] * num_ranks
        for exchange in () if leaving is None else leaving.leaving:
            sent[_rank(exchange.peer, num_ranks)] += exchange.num_rows
        for exchange in arriving_from(unit, arriving):
            received[_rank(exchange.peer, num_ranks)] += exchange.num_rows
        return cls(sent=tuple(sent), received=tuple(received))

    def to_others(self, rank: int, *, backward: bool) -> int:
        """Return how many rows rank `rank`, whose splits these are, sends to other ranks: forward, and in the backward too."""
        rows = sum(self.sent) - self.sent[rank]
        return rows + sum(self.received) - self.received[rank] if backward else rows


@dataclass(slots=True)
class ExchangedBytes:
    """Bytes that this rank has sent to other ranks, and those that the plans say, up to now."""

    sent: int = 0
    planned: int = 0


def arriving_from(unit: str, cargo: Cargo | None) -> list[Exchange]:
    """Return the exchanges of the LLM's cargo with one encoder, in the order of the encoder's ranks."""
    return [] if cargo is None else [exchange for exchange in cargo.arriving if exchange.unit == unit]


def rows_to_send(cargo: Cargo | None, device: torch.device) -> slice | Tensor:
    """Return the index of an encoder's rows in the order in which they leave: by rank, then by sample. cargo: on the device."""
    rows = [] if cargo is None else [exchange.rows for exchange in cargo.leaving]
    if not rows:
        return slice(0, 0)
    if len(rows) == 1:
        return rows[0]
    return torch.cat([torch.arange(some.start, some.stop, device=device) if isinstance(some, slice) else some for some in rows])


def exchange_rows(rows: Tensor, splits: Splits, group: dist.ProcessGroup, count: ExchangedBytes) -> Tensor:
    """Send rows (sum of `splits.sent`, width), sorted by rank, and return those received (sum of `splits.received`, width).

    All ranks of the group call it, also those that have no rows. The gradient takes the same way back, in one all-to-all more.
    """
    arrived: Tensor = _RowExchange.apply(rows, splits, group, count)  # type: ignore[no-untyped-call]
    return arrived


class _RowExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, splits: Splits, group: dist.ProcessGroup, count: ExchangedBytes) -> Tensor:
        ctx.way = splits, group, count
        return _all_to_all(rows, splits.sent, splits.received, group, count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        splits, group, count = ctx.way
        return _all_to_all(gradient, splits.received, splits.sent, group, count), None, None, None


def _all_to_all(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup, count: ExchangedBytes
) -> Tensor:
    """Exchange rows as bytes, since not every backend knows every dtype."""
    rows = rows.contiguous()
    arrived = rows.new_empty((sum(received), rows.shape[1]))
    row_bytes = rows.shape[1] * rows.element_size()
    count.sent += (len(rows) - sent[dist.get_rank(group)]) * row_bytes
    dist.all_to_all_single(arrived.view(torch.uint8), rows.view(torch.uint8), list(received), list(sent), group=group)
    return arrived


def _rank(place: int, num_ranks: int) -> int:
    """Return the rank of a place: those of each unit are numbered by rank, one unit behind the other."""
    return place % num_ranks
