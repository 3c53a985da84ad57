"""In which order a slice sends and computes: what could overlap does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.errors import UserError
from headrace.trainer.pipeline.slice_products import add_summed_product, gathered_product
from headrace.trainer.pipeline.slice_rows import SliceRows
from headrace.trainer.pipeline.tensor_parallel import Slices

ROWS, WIDTH, INNER = 8, 4, 6


class Trace(TorchDispatchMode):
    """Notes matrix products, and is a group of two slices in which nothing is sent, but noted."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            of_rows = args[-1].shape != (ROWS, args[-1].shape[1])  # that of a weight sums over the rows
            self.events.append("product" if of_rows else "weight's gradient")
        return func(*args, **(kwargs or {}))

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def _allgather_base(self, whole: Tensor, share: Tensor) -> Noted:
        return self._begin("gather", len(whole) // self.size() == len(share))

    def _reduce_scatter_base(self, share: Tensor, whole: Tensor, _: Any) -> Noted:
        return self._begin("sum", len(whole) // self.size() == len(share))

    def _begin(self, what: str, fits: bool) -> Noted:
        assert fits
        self.events.append(what)
        return Noted(self.events, what)


class Noted:
    """The wait for what a `Trace` noted."""

    def __init__(self, events: list[str], what: str) -> None:
        self._events = events
        self._what = what

    def wait(self) -> None:
        self._events.append(f"{self._what} is there")


def rows_in(pieces: int, trace: Trace) -> SliceRows:
    return SliceRows(ROWS, trace, pieces)  # type: ignore[arg-type]


def backward_of(output: Tensor, trace: Trace) -> list[str]:
    trace.events.clear()
    output.sum().backward()
    return trace.events


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_a_piece_is_multiplied_while_the_next_ones_are_gathered(pieces: int) -> None:
    matrix = nn.Linear(WIDTH, INNER, bias=False)
    with Trace() as trace:
        gathered_product(torch.ones(ROWS // 2, WIDTH), rows_in(pieces, trace), matrix)
    assert trace.events == ["gather"] * pieces + ["gather is there", "product"] * pieces


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_gradients_of_rows_are_summed_while_the_next_and_those_of_weights_are_computed(pieces: int) -> None:
    matrix = nn.Linear(WIDTH, INNER, bias=False)
    share = torch.ones(ROWS // 2, WIDTH, requires_grad=True)
    with Trace() as trace:
        product = gathered_product(share, rows_in(pieces, trace), matrix)
        events = backward_of(product, trace)
    assert events == ["product", "sum"] * pieces + ["weight's gradient"] + ["sum is there"] * pieces


@pytest.mark.parametrize("pieces", [2, 4])
def test_a_piece_of_products_is_summed_while_the_next_is_computed_and_its_gradient_taken_as_it_comes(
    pieces: int,
) -> None:
    matrix = nn.Linear(INNER, WIDTH, bias=False)
    inner = torch.ones(ROWS, INNER, requires_grad=True)
    with Trace() as trace:
        output = add_summed_product(torch.ones(ROWS // 2, WIDTH), inner, rows_in(pieces, trace), matrix)
        assert trace.events == ["product", "sum"] * pieces + ["sum is there"] * pieces
        events = backward_of(output, trace)
    assert events == ["gather"] * pieces + ["gather is there", "product"] * pieces + ["weight's gradient"]


def test_layers_that_are_not_ours_are_refused_in_pieces() -> None:
    with pytest.raises(UserError, match="exchange all rows of a microbatch at once: set the unit's tp_overlap to 1"):
        Slices(Trace(), pieces=2).shard([nn.Identity()])  # type: ignore[arg-type]
