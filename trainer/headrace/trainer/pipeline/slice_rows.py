"""Which rows of a microbatch each tensor-parallel slice of a stage has between matrices, and how slices exchange them.

This is sequence parallelism (Korthikanti et al. 2022, section 4.2.2) with rows that are dealt in blocks. T rows are P pieces of
n blocks of B rows, one for each of n slices: B = ceil(T / (n P)). Slice i has block i of every piece, S = P B rows. So the blocks
of a piece, gathered, are consecutive rows, and so is what a matrix makes of them: slices can compute with a piece while the next
is on its way, and put nothing in order afterwards. StepCCL (DistTrain, Zhang et al. 2024, section 7), whose slices have
consecutive rows, has to. With one piece, they are consecutive here too.

Rows past T are padding: zeros when they are made, and dropped where the blocks come together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

_SUM = dist.ReduceScatterOptions()  # their default, made once


class SliceRows:
    """The rows of one microbatch, and this slice's share of them. Immutable.

    In the shapes, T is the number of all rows, S that of this slice's share with its padding, and ... is nothing, or the batch of
    one of layers of `transformers`. All sums and gathers are collective.
    """

    def __init__(self, num_rows: int, group: dist.ProcessGroup, pieces: int = 1) -> None:
        """`num_rows`: T. `pieces`: P; fewer rows than n P are one piece."""
        self.num_rows = num_rows
        self.group = group
        self._slices = group.size()
        self.pieces = pieces if num_rows >= pieces * self._slices else 1
        self._block = -(-num_rows // (self._slices * self.pieces))
        self.num_own = self._block * self.pieces
        """S, padding included."""
        self._missing = self.num_own * self._slices - num_rows
        of_piece = self._block * self._slices
        ends = [min(piece * of_piece, num_rows) for piece in range(self.pieces + 1)]
        self._bounds = list(pairwise(ends))

    def piecewise(self, *wholes: Tensor) -> Sequence[tuple[Tensor, ...]]:
        """Return each piece of tensors (T, ...), as views of their rows; the last ones are empty where padding fills them."""
        if self.pieces == 1:
            return [wholes]
        return [tuple([whole[first:end] for whole in wholes]) for first, end in self._bounds]

    def start_gather(self, share: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """Begin to gather the rows (T, W) of all slices from their shares (S, W); return them with the wait for each piece."""
        whole, share = share.new_empty(self.num_own * self._slices, share.shape[1]), share.contiguous()
        if self.pieces == 1:
            works = [self.group._allgather_base(whole, share)]
        else:
            blocks = zip(whole.chunk(self.pieces), share.chunk(self.pieces), strict=True)
            works = [self.group._allgather_base(piece, block) for piece, block in blocks]
        return whole if self._missing == 0 else whole[: self.num_rows], works

    def start_sum(self, part: Tensor, share: Tensor, piece: int) -> dist.Work:
        """Begin to sum all slices' parts of a piece, as from `piecewise`, into this slice's block of it in `share` (S, W)."""
        missing = self._block * self._slices - part.shape[0]
        if missing:
            part = functional.pad(part, (0, 0, 0, missing))
        block = share if self.pieces == 1 else share[piece * self._block : (piece + 1) * self._block]
        return self.group._reduce_scatter_base(block, part.contiguous(), _SUM)

    def gather(self, share: Tensor) -> Tensor:
        """Return the rows (..., T, W) of all slices from their shares (..., S, W)."""
        if share.dim() == 3:
            return self.gather(share[0])[None]
        whole, works = self.start_gather(share)
        for work in works:
            work.wait()
        return whole

    def sum(self, part: Tensor) -> Tensor:
        """Return this slice's share (..., S, W) of the sum of all slices' parts (..., T, W)."""
        if part.dim() == 3:
            return self.sum(part[0])[None]
        share = part.new_empty(self.num_own, part.shape[1])
        works = [self.start_sum(piece, share, index) for index, (piece,) in enumerate(self.piecewise(part))]
        for work in works:
            work.wait()
        return share

    def own(self, whole: Tensor) -> Tensor:
        """Return this slice's share (..., S, W), with storage of its own, of rows (..., T, W) that all slices have."""
        if self._missing:
            whole = functional.pad(whole, (0, 0, 0, self._missing))
        blocks = whole.unflatten(-2, (self.pieces, self._slices, self._block))  # type: ignore[no-untyped-call]
        mine: Tensor = blocks.select(-3, self.group.rank())
        return mine.flatten(-3, -2).clone(memory_format=torch.contiguous_format)
