"""Rows that units hand each other: where they lie, between which processes they go, and their order at the other end."""

from __future__ import annotations

import itertools

import pytest
import torch

from headrace.spec import parse
from headrace.trainer.pipeline.routes import Handover, Portion
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from headrace.trainer.pipeline.unit_exchange import Exchange, Exchanges, in_order, orders_of

FROM, INTO = Portion("vision", 1, 0, 0, (1, 2, 3)), Portion("llm", 0, 0, 0, (3, 1, 2))
RANGES = {3: range(2), 1: range(2, 5), 2: range(5, 9)}


def exchanges(place: Place, theirs: int = 1, ours: int = 1) -> Exchanges:
    """Of vision with so many slices, in two replicas of two stages, and an LLM of two stages."""
    units = {"vision": {"dp": 2, "pp": 2, "tp": theirs}, "llm": {"pp": 2, "tp": ours}}
    topology = parse(PipelineTopology, {"units": units}, "topology")
    return Exchanges(topology, place)


def arriving(*samples: int, slice: int = 0, theirs: int = 1, ours: int = 1) -> Exchange:
    process = exchanges(Place("llm", 0, 0, slice), theirs, ours)
    return process.arriving([Handover(FROM, INTO, samples, 0)], {"vision": RANGES})[0]


def leaving(*samples: int, slice: int = 0, theirs: int = 1, ours: int = 1) -> Exchange:
    process = exchanges(Place("vision", 1, 1, slice), theirs, ours)
    return process.leaving([Handover(FROM, INTO, samples, 0)], RANGES)[0]


@pytest.mark.parametrize(("theirs", "ours"), list(itertools.product((1, 2, 4), repeat=2)))
def test_each_process_sends_to_those_that_wait_for_it(theirs: int, ours: int) -> None:
    """Replica 1 of vision has the ranks from 2 x theirs on, its last stage those from 3 x theirs on; the LLM's follow."""
    ends = {3 * theirs + number: leaving(1, slice=number, theirs=theirs, ours=ours).neighbours for number in range(theirs)}
    starts = {4 * theirs + number: arriving(1, slice=number, theirs=theirs, ours=ours).neighbours for number in range(ours)}
    for senders, receivers in ((ends, starts), (starts, ends)):
        sent = {(rank, to) for rank, neighbours in senders.items() for to in neighbours.receivers}
        assert sent == {(neighbours.source, rank) for rank, neighbours in receivers.items()}


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
    assert exchanges(Place("llm", 0, 0, 0)).arriving([Handover(FROM, INTO, (99,), 0)], {"vision": RANGES}) == []


@pytest.mark.parametrize("parts", [[(3, 1, 2)], [(1, 2, 3)], [(1, 2), (3,)], [(1,), (3,), (2,)], [(2, 3), (1,)]], ids=str)
def test_rows_of_all_handovers_come_into_the_order_of_the_samples(parts: list[tuple[int, ...]]) -> None:
    handovers = [arriving(*samples) for samples in parts]
    arrived = [torch.tensor([[row] for sample in samples for row in RANGES[sample]]) for samples in parts]
    assert in_order(handovers, arrived, orders_of(handovers))["vision"].flatten().tolist() == list(range(9))
