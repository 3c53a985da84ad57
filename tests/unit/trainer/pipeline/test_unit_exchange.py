"""Rows that units hand each other: where they lie, between which slices each share of them goes, and how slices join them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.spec import parse
from headrace.trainer.pipeline.routes import Handover, Portion
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from headrace.trainer.pipeline.unit_exchange import Exchange, Exchanges, Join, joined
from tests.examples import with_examples

FROM, INTO = Portion("vision", 1, 0, 0, (1, 2, 3)), Portion("llm", 0, 0, 0, (3, 1, 2))
RANGES = {3: range(2), 1: range(2, 5), 2: range(5, 9)}
SENT = {1: range(3), 2: range(3, 7), 3: range(7, 9)}
"""Where the same rows lie in what vision makes of FROM."""


def exchanges(place: Place, theirs: int = 1, ours: int = 1) -> Exchanges:
    """Of vision with so many slices, in two replicas of two stages, and an LLM of two stages."""
    units = {"vision": {"dp": 2, "pp": 2, "tp": theirs}, "llm": {"pp": 2, "tp": ours}}
    topology = parse(PipelineTopology, {"units": units}, "topology")
    return Exchanges(topology, place)


def arriving(*samples: int) -> Exchange:
    [exchange], _ = exchanges(Place("llm", 0, 0, 0)).arriving([Handover(FROM, INTO, samples, 0)], {"vision": RANGES})
    return exchange


def leaving(*samples: int) -> Exchange:
    [exchange], _ = exchanges(Place("vision", 1, 1, 0)).leaving([Handover(FROM, INTO, samples, 0)], RANGES)
    return exchange


Side = Sequence[tuple[Sequence[Exchange], Join]]
"""The exchanges of each slice of a stage, and how they join what they receive by them."""


def both_sides(parts: Sequence[Sequence[int]], theirs: int, ours: int) -> tuple[Side, Side]:
    """Of vision's last stage and the LLM's first one, whose handovers have these samples."""
    handovers = [Handover(FROM, INTO, tuple(samples), number) for number, samples in enumerate(parts)]
    ends, starts = [], []
    for number in range(theirs):
        own, joins = exchanges(Place("vision", 1, 1, number), theirs, ours).leaving(handovers, SENT)
        ends.append((own, joins["llm"]))
    for number in range(ours):
        own, joins = exchanges(Place("llm", 0, 0, number), theirs, ours).arriving(handovers, {"vision": RANGES})
        starts.append((own, joins["vision"]))
    return ends, starts


def passed_on(whole: Tensor, senders: Side, receivers: Side, first_of: tuple[int, int]) -> list[Tensor]:
    """What each slice of one side has after all slices of the other, who have the same rows, have sent their shares.

    first_of: the number of the place of each side's first slice.
    """
    wire = {
        (first_of[0] + number, exchange.peer, exchange.number): whole[exchange.rows]
        for number, (own, _) in enumerate(senders)
        for exchange in own
    }
    received = [
        [wire.pop((exchange.peer, first_of[1] + number, exchange.number)) for exchange in own] or [whole[:0]]
        for number, (own, _) in enumerate(receivers)
    ]
    assert not wire, "somebody waits for each message"
    contributions: list[Tensor] = []
    for own, (_, join) in zip(received, receivers, strict=True):
        joined(own, join, _into(contributions))
    return [joined(own, join, lambda _: torch.cat(contributions)) for own, (_, join) in zip(received, receivers, strict=True)]


def _into(contributions: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """What takes the place of a gather, to see what a slice contributes to it."""

    def keep(share: Tensor) -> Tensor:
        contributions.append(share)
        return share.repeat(4, 1)

    return keep


PARTS = [[(3, 1, 2)], [(1, 2, 3)], [(1, 2), (3,)], [(1,), (3,), (2,)], [(2, 3), (1,)]]
WIDTHS = list(itertools.product((1, 2, 3, 4), repeat=2))


@pytest.mark.parametrize(("theirs", "ours"), WIDTHS)
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_every_slice_has_all_rows_in_order_and_every_gradient_comes_back(
    parts: list[tuple[int, ...]], theirs: int, ours: int
) -> None:
    """Replica 1 of vision has the ranks from 2 x theirs on, its last stage those from 3 x theirs on; the LLM's follow."""
    ends, starts = both_sides(parts, theirs, ours)
    sent = torch.tensor([[float(10 * sample + row)] for sample in FROM.samples for row in range(len(SENT[sample]))])
    in_llm = torch.tensor([[float(10 * sample + row)] for sample in INTO.samples for row in range(len(RANGES[sample]))])
    for rows in passed_on(sent, ends, starts, (3 * theirs, 4 * theirs)):
        assert torch.equal(rows, in_llm)
    for gradient in passed_on(in_llm, starts, ends, (4 * theirs, 3 * theirs)):
        assert torch.equal(gradient, sent)


@pytest.mark.parametrize(("theirs", "ours"), WIDTHS)
def test_each_row_crosses_once_and_slices_have_equal_shares(theirs: int, ours: int) -> None:
    for side in both_sides([(3, 1, 2)], theirs, ours):
        shares = [sum(exchange.num_rows for exchange in own) for own, _ in side]
        assert sum(shares) == 9
        assert max(shares) - 9 / len(side) <= max(theirs, ours), "a row more for each message at most"


@with_examples(60)
@given(st.integers(1, 4), st.integers(1, 4), st.sets(st.sampled_from((1, 2, 3)), min_size=1))
def test_shares_are_those_of_what_could_be_decoded(theirs: int, ours: int, good: set[int]) -> None:
    """Both sides leave the same samples out, whatever shares their rows would have been in."""
    parts = [[sample for sample in part if sample in good] for part in ((2, 3), (1,))]
    ends, starts = both_sides([part or [99] for part in parts], theirs, ours)
    num_rows = sum(len(RANGES[sample]) for sample in good)
    for side in (ends, starts):
        assert sum(exchange.num_rows for own, _ in side for exchange in own) == num_rows
        assert {join.num_rows for _, join in side} == {num_rows}


def test_rows_that_follow_each_other_are_a_slice() -> None:
    assert arriving(3, 1).rows == slice(0, 5)
    assert leaving(1, 2).rows == slice(2, 9)


def test_other_rows_are_listed_in_the_order_of_the_handover() -> None:
    exchange = arriving(2, 3)
    assert isinstance(exchange.rows, torch.Tensor)
    assert exchange.rows.tolist() == [5, 6, 7, 8, 0, 1]
    assert exchange.num_rows == 6


def test_what_could_not_be_decoded_has_no_rows_and_a_handover_without_rows_is_none() -> None:
    assert arriving(3, 99).num_rows == 2
    none = exchanges(Place("llm", 0, 0, 0)).arriving([Handover(FROM, INTO, (99,), 0)], {"vision": RANGES})
    assert none == ([], {})


def test_rows_that_come_in_order_are_not_copied() -> None:
    """As from one slice to one slice, with everything that a microbatch has in one message."""
    _, joins = exchanges(Place("llm", 0, 0, 0)).arriving([Handover(FROM, INTO, (3, 1, 2), 0)], {"vision": RANGES})
    rows = torch.ones(9, 1)
    assert joined([rows], joins["vision"], lambda share: share).data_ptr() == rows.data_ptr()
