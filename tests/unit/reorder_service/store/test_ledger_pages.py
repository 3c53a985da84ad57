"""Pages of the ledger: what a store keeps of steps that were committed some time ago, and that it is all of it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from headrace.errors import ConflictError
from headrace.quarantine import Reason, Rejected
from headrace.reorder_service.store.ledger_pages import PAGE_STEPS, LedgerPage, steps_per_page
from headrace.reorder_service.store.progress import Amounts, Progress, StepRecord
from headrace.reorder_service.store.state import StateStore

PAGE = 4
NAMES = some.lists(some.text(some.characters(exclude_categories=["Cs"]), max_size=9), max_size=9).map(sorted)
AMOUNTS = some.dictionaries(some.text("ab"), some.builds(Amounts, some.integers(0, 1 << 60)), max_size=2)
NUMBERS = some.floats(allow_infinity=False)
RECORDS = some.builds(
    StepRecord,
    samples=NAMES.map(tuple),
    substitutes=NAMES.map(tuple),
    loss=NUMBERS,
    step_s=NUMBERS,
    data_wait_s=NUMBERS,
    delivered=AMOUNTS,
)


def committed(step: int, *, loss: float = 0.5) -> StepRecord:
    """Its times are such that sums of them in another order differ in the last digit."""
    names = tuple(sorted(f"d/a/{3 * step + n:05d}" for n in range(3)))
    delivered = {"d": Amounts(3, tokens=7 * step)}
    return StepRecord(samples=names, loss=loss, step_s=0.1 * step, data_wait_s=1 / (step + 3), delivered=delivered)


async def commit(store: StateStore, start: int, stop: int, *, loss: float = 0.5) -> None:
    for step in range(start, stop):
        bad = Rejected(name=f"bad{step}", reason=Reason.TOO_LARGE, detail="9 > 8", sample_id=step)
        await store.commit_step("job", step, committed(step, loss=loss), [bad])


async def make_job(store: StateStore, num_steps: int) -> None:
    await store.create_job("job", "{}")
    await commit(store, 0, num_steps)


async def compact(store: StateStore) -> int:
    """Until nothing is left to do; the number of pages made."""
    pages = 0
    while await store.compact_ledger("job", PAGE):
        pages += 1
    return pages


async def seen(store: StateStore) -> tuple[Any, ...]:
    """Everything about the job's steps that anybody can ask for."""
    records = [record async for record in store.steps("job")]
    tails = [[record async for record in store.steps("job", start)] for start in range(len(records) + 1)]
    assert tails == [records[start:] for start in range(len(records) + 1)]
    record = await store.load_job("job")
    quarantine = sorted([item.name async for item in store.quarantine("job")])
    return records, record.cursor, record.progress, record.state, quarantine


@given(some.integers(0, 1 << 40), some.lists(RECORDS, max_size=PAGE_STEPS), some.text("0123456789abcdef"))
def test_a_page_is_read_as_what_it_was_made_of(first: int, records: list[StepRecord], former: str) -> None:
    page, text = LedgerPage.of(first, records, Progress(), former)
    assert repr(LedgerPage.read(text)) == repr(page)
    assert repr(page.records) == repr(tuple(records))


def test_any_change_of_a_page_is_found() -> None:
    _, text = LedgerPage.of(0, [committed(0)], Progress(), "")
    other = json.loads(LedgerPage.of(0, [committed(1)], Progress(), "")[1])
    for field in ("former", "digest", "bytes", "zstd"):
        value = {"former": "0", "bytes": 1 << 20}.get(field, other[field])
        with pytest.raises(ConflictError, match="damaged"):
            LedgerPage.read(json.dumps({**json.loads(text), field: value}))
    for broken in ("", "{}", text[:-9]):
        with pytest.raises(ConflictError, match="damaged"):
            LedgerPage.read(broken)


def test_a_page_has_fewer_steps_where_they_are_large() -> None:
    assert [steps_per_page(size) for size in (1, 4_096, 8_192, 1 << 18, 1 << 20)] == [64, 64, 32, 1, 1]


async def test_nothing_that_can_be_asked_changes_when_a_ledger_is_compacted(store: StateStore) -> None:
    await make_job(store, 4 * PAGE + 1)
    before = await seen(store)
    assert await compact(store) == 3
    assert await seen(store) == before
    assert await store.database.client.llen("headrace:{job}:ledger") == PAGE + 1
    await commit(store, 4 * PAGE + 1, 4 * PAGE + 3, loss=math.nan)
    assert (await store.load_job("job")).cursor == 4 * PAGE + 3


@pytest.mark.parametrize("step", range(0, 4 * PAGE + 2, 3))
async def test_going_back_is_the_same_with_pages_and_without(store: StateStore, step: int) -> None:
    """To the middle of a page, to where one begins, and to the steps behind all of them; and on from there."""
    results = []
    for compacted in (False, True):
        await store.database.client.delete(*[key async for key in store.database.client.scan_iter()])
        await make_job(store, 4 * PAGE + 1)
        assert await compact(store) == 3 if compacted else True
        await store.rewind("job", step)
        results.append([await seen(store)])
        await commit(store, step, 6 * PAGE, loss=0.25)
        assert await compact(store) if compacted else True
        results[-1].append(await seen(store))
    assert results[0] == results[1]


async def test_pages_are_chained_by_their_digests(store: StateStore) -> None:
    await make_job(store, 4 * PAGE)
    await compact(store)
    client, key = store.database.client, "headrace:{job}:pages"
    texts = await client.zrange(key, 0, -1)
    pages = [LedgerPage.read(text) for text in texts]
    assert [(page.first, page.former) for page in pages] == [(0, ""), (PAGE, pages[0].digest), (2 * PAGE, pages[1].digest)]
    _, other = LedgerPage.of(PAGE, [replace(record, loss=9.0) for record in pages[1].records], pages[1].before, pages[1].former)
    await client.zrem(key, texts[1])
    await client.zadd(key, {other: PAGE})
    with pytest.raises(ConflictError, match="step 8 is not where the ledger"):
        [record async for record in store.steps("job")]
    await client.zrem(key, other)
    with pytest.raises(ConflictError, match="step 4 is not where the ledger"):
        [record async for record in store.steps("job")]


async def test_a_ledger_that_changes_while_it_is_compacted_is_compacted_as_it_is_then(store: StateStore) -> None:
    await make_job(store, 2 * PAGE)
    prepared = store._steps.compact

    async def compact_late(job: str, num_steps: int) -> Any:
        commands = await prepared(job, num_steps)
        store._steps.compact = prepared  # type: ignore[method-assign]
        await store.rewind("job", 1)
        await commit(store, 1, 2 * PAGE, loss=0.125)
        return commands

    store._steps.compact = compact_late  # type: ignore[method-assign]
    assert await compact(store) == 1
    assert [record.loss async for record in store.steps("job")] == [0.5] + [0.125] * (2 * PAGE - 1)


@pytest.mark.parametrize("former", ["4", "5"])
async def test_a_store_of_an_older_release_is_read_and_compacted_and_belongs_to_this_one_from_its_first_page_on(
    store_url: str, former: str
) -> None:
    """An older release has no `paged`, and its entries are those of this one."""
    store = await StateStore.open(store_url)
    await make_job(store, 3 * PAGE)
    before = await seen(store)
    await store.database.client.set("headrace:format", former)
    await store.close()
    store = await StateStore.open(store_url)
    assert await store.database.client.get("headrace:format") == "5"
    assert await seen(store) == before
    assert await compact(store) == 2
    assert await store.database.client.get("headrace:format") == "6"
    assert await seen(store) == before
    await store.close()
    store = await StateStore.open(store_url)
    assert await seen(store) == before
    await store.close()


async def test_entries_of_the_older_release_are_as_they_were(store: StateStore) -> None:
    await store.create_job("job", "{}")
    await commit(store, 0, 1)
    entry = json.loads(await store.database.client.lindex("headrace:{job}:ledger", 0))
    assert entry == json.loads(json.dumps({**asdict(committed(0)), "sums": asdict(Progress().after(committed(0)))}))
