"""What waits to be sent leaves in batches that are bounded by number and by bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.outbox import MAX_BATCH, MAX_BATCH_BYTES, Outbox


async def batches_of(items: list[int], *, sized: bool) -> list[list[int]]:
    outbox = Outbox[int]()
    for item in items:
        outbox.put(item)
    outbox.end()
    return [batch async for batch in outbox.batches(int if sized else None)]


SIZES = st.lists(st.sampled_from([0, 1, 1000, MAX_BATCH_BYTES // 3, MAX_BATCH_BYTES, 3 * MAX_BATCH_BYTES]), max_size=700)


@given(sizes=SIZES)
async def test_items_leave_in_order_in_the_fewest_batches_within_both_bounds(sizes: list[int]) -> None:
    batches = await batches_of(sizes, sized=True)
    assert [size for batch in batches for size in batch] == sizes
    for batch, following in zip(batches, [*batches, []][1:], strict=True):
        assert 1 <= len(batch) <= MAX_BATCH
        assert sum(batch) <= MAX_BATCH_BYTES or len(batch) == 1
        if following:
            assert len(batch) == MAX_BATCH or sum(batch) + following[0] > MAX_BATCH_BYTES, "it would have had room"


async def test_items_without_a_size_are_bounded_by_number() -> None:
    assert [len(batch) for batch in await batches_of([MAX_BATCH_BYTES] * 600, sized=False)] == [256, 256, 88]
