"""How a step's parts are put into lots, and what a lot asks of a preprocessor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headrace.reorder_service.fleet.fleet import Fleet
from headrace.reorder_service.fleet.member import Member
from headrace.reorder_service.jobs.part_decoding import LOTS_PER_MEMBER, Decoding, lots_of
from headrace.reorder_service.jobs.planned_step import PlannedPart
from headrace.reorder_service.jobs.work_orders import Orders
from headrace.sample import SampleRef
from headrace.v1.common_pb2 import Shard
from headrace.v1.fleet_pb2 import FleetOrder


def part(replica: int, microbatch: int, num_samples: int, first: int = 0) -> PlannedPart:
    samples = tuple(SampleRef(sample_id=first + n, shard=(first + n) % 3, row=n) for n in range(num_samples))
    return PlannedPart(
        ticket=f"job/{replica}/{microbatch}/{first}.x",
        replica=replica,
        microbatch=microbatch,
        places=frozenset({("llm", replica)}),
        samples=samples,
        shards={shard: sum(ref.shard == shard for ref in samples) for shard in {ref.shard for ref in samples}},
        probed_by={"prober": num_samples},
    )


@given(
    parts=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(1, 20)), max_size=60),
    most_samples=st.integers(1, 16),
    num_members=st.integers(0, 8),
)
def test_lots_have_all_parts_in_the_order_of_need_and_are_no_larger_than_a_large_part_and_enough_for_all_members(
    parts: list[tuple[int, int, int]], most_samples: int, num_members: int
) -> None:
    made = [part(*numbers) for numbers in parts]
    lots = list(lots_of(made, most_samples=most_samples, num_members=num_members))
    dealt = [one for lot in lots for one in lot]
    assert sorted(map(id, dealt)) == sorted(map(id, made))
    assert [(one.microbatch, one.replica) for one in dealt] == sorted((one.microbatch, one.replica) for one in made)
    for lot in lots:
        assert len({one.microbatch for one in lot}) == 1
        assert len(lot) == 1 or sum(len(one.samples) for one in lot) <= most_samples
    assert len(lots) >= min(len(made), LOTS_PER_MEMBER * num_members)


def placed(parts: list[PlannedPart], *, takes_lots: bool = True) -> tuple[list[FleetOrder], list[str], Member, Fleet]:
    """The orders that one preprocessor gets for parts of one lot, the tickets that were said to be placed, it, and its fleet."""
    fleet, orders, told = Fleet(), list[FleetOrder](), list[str]()
    member = Member(
        name="p",
        endpoint="p:1",
        slots=8,
        send=lambda order: orders.append(order) if order.WhichOneof("order") else None,
        introduce=lambda _: FleetOrder(),
        dismiss=lambda: None,
        takes_lots=takes_lots,
    )
    fleet.join(member)
    manifest: Any = SimpleNamespace(message=lambda number: Shard(number=number))
    decoding = Decoding(
        Orders("job", 1.0, fleet, manifest),
        7,
        on_placed=lambda one: told.append(one.ticket),
        on_failed=told.append,
        urgent=lambda: False,
        wanted=lambda: True,
    )
    decoding.submit(parts)
    return orders, told, member, fleet


def test_a_lot_is_one_order_which_names_each_shard_once_and_its_parts_have_one_place() -> None:
    parts = [part(0, 1, 4), part(1, 1, 2, first=4)]
    orders, told, member, fleet = placed(parts)
    (order,) = orders
    asked = order.decode_parts
    assert [(one.ticket, [ref.sample_id for ref in one.samples], one.strict) for one in asked.parts] == [
        (parts[0].ticket, [0, 1, 2, 3], True),
        (parts[1].ticket, [4, 5], True),
    ]
    assert [shard.number for shard in asked.shards] == [0, 1, 2]
    assert not any(one.lease or one.shards for one in asked.parts)
    assert told == [one.ticket for one in parts]
    assert {(one.lease, one.endpoint) for one in parts} == {(asked.lease, "p:1")}
    fleet.finish(member, asked.lease, None)
    assert {one.agreed.decoded_by for one in parts} == {"p"}


def test_where_one_part_cannot_be_decoded_each_is_asked_for_by_itself_and_only_that_one_is_claimed_to_be_damaged() -> None:
    parts = [part(0, 0, 2), part(1, 0, 2, first=2)]
    orders, _, member, fleet = placed(parts)
    fleet.fail(member, orders[0].decode_parts.lease, "cannot decode", [SimpleNamespace(sample_id=3)])
    again = [order.decode_part for order in orders[1:]]
    assert [one.ticket for one in again] == [one.ticket for one in parts]
    assert [[shard.number for shard in one.shards] for one in again] == [[0, 1], [0, 2]]
    assert len({one.lease for one in again}) == 2
    assert [one.agreed.claims for one in parts] == [{}, {}]
    assert parts[0].work is not parts[1].work


def test_a_preprocessor_of_an_older_release_gets_each_part_by_itself() -> None:
    orders, told, *_ = placed([part(0, 0, 2), part(1, 0, 2, first=2)], takes_lots=False)
    assert [order.WhichOneof("order") for order in orders] == ["decode_part", "decode_part"]
    assert len(told) == 2


def test_a_part_alone_is_no_lot() -> None:
    (order,), *_ = placed([part(0, 0, 2)])
    assert order.decode_part.ticket == part(0, 0, 2).ticket
