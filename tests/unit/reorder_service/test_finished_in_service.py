"""Finished jobs in a running service: out of memory, at hand when asked for, deleted on demand and after their time."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from headrace.errors import ConflictError, NotFoundError
from headrace.reorder_service import service as module
from headrace.reorder_service.jobs.job import JobRun
from headrace.reorder_service.keep_finished import DAY_S, KeepFinished
from headrace.reorder_service.service import ReorderService
from headrace.reorder_service.store.finished_jobs import Summary
from tests.unit.reorder_service.job_world import Preprocessor, Start, consume, names, submit


async def finish(service: ReorderService, name: str = "job") -> JobRun:
    run = await submit(service, name=name, join=not service.fleet.members, steps=3)
    await run.wait_ready()
    await consume(run, run.open_session(0, 1))
    assert run.cursor.state == "DONE"
    return run


async def test_a_leader_takes_up_what_runs_and_loads_what_is_over_when_asked(start: Start) -> None:
    service = await start()
    await finish(service, "over")
    await submit(service, name="runs", join=False)
    again = await start()
    assert list(again.jobs) == ["runs"]
    run = await again.load("over")
    assert (run.cursor.state, run.cursor.committed, len(await names(run))) == ("DONE", 3, 3)
    assert await again.load("over") is run
    with pytest.raises(NotFoundError, match="no job 'none' here; there are: runs; `headrace job list`"):
        await again.load("none")


async def test_a_finished_job_that_is_reset_runs_again(start: Start) -> None:
    await finish(await start())
    service = await start()
    run = await service.load("job")
    await run.rewind(1)
    Preprocessor(service=service).join()
    assert service.running_jobs() == ["job"]
    assert await consume(run, run.open_session(0, 1)) == [1, 2]


async def test_finished_jobs_that_nobody_uses_leave_memory(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_FINISHED", 2)
    service = await start()
    for number in range(5):
        await finish(service, f"job{number}")
    await submit(service, name="runs", join=False)
    await service.forget_unused()
    assert len(service.jobs) == 6  # any of them may be in somebody's hands yet
    monkeypatch.setattr(module, "UNUSED_S", 0.0)
    for run in service.jobs.values():
        run.sessions.by_rank.clear()
    service.jobs["job1"].open_session(0, 1).begin_streaming()
    for name in ("job4", "job0"):
        await service.load(name)
    await service.forget_unused()
    assert sorted(service.jobs) == sorted(service.nodes) == ["job0", "job1", "job4", "runs"]
    assert (await service.load("job2")).cursor.committed == 3


async def test_a_deleted_job_is_gone_for_everybody(start: Start) -> None:
    service = await start()
    run = await finish(service)
    session = run.open_session(0, 1)
    await service.delete("job")
    assert isinstance(session.over, NotFoundError)
    for name in ("job", "another"):
        with pytest.raises(NotFoundError, match=f"no job '{name}'"):
            await service.delete(name)
        with pytest.raises(NotFoundError):
            await service.load(name)
    again = await finish(service)
    assert again.key != run.key


async def test_who_asks_for_a_job_that_was_deleted_lately_is_told_so(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a trainer does that had not heard of its end, or a person who watches it."""
    monkeypatch.setattr(module, "_REMEMBERED", 2)
    service = await start()
    for name in ("first", "second", "third"):
        await finish(service, name)
        await service.delete(name)
    for name in ("second", "third"):
        with pytest.raises(NotFoundError, match=f"^no job '{name}' here: it was deleted$"):
            await service.load(name)
    with pytest.raises(NotFoundError, match=r"^no job 'first' here; there are: none;"):
        await service.load("first")


@pytest.mark.parametrize("end", ["done", "cancelled"])
async def test_the_name_of_a_deleted_job_begins_anew(end: str, start: Start) -> None:
    service = await start()
    Preprocessor(service=service, bad_rows={1, 2}).join()
    run = await submit(service, join=False, steps=6)
    await run.wait_ready()
    await consume(run, run.open_session(0, 1), stop=None if end == "done" else 5)
    await run.cancel()
    assert run.cursor.state == end.upper()
    old = await names(run)
    assert (len(old), await service.store.num_quarantined("job")) == (6 if end == "done" else 5, 2)
    await service.delete("job")
    assert [key async for key in service.store.database.client.scan_iter("headrace:{job}:*")] == []
    again = await submit(service, join=False, steps=3, seed=7)
    await again.wait_ready()
    assert (again.cursor.committed, again.cursor.progress.samples, again.generation) == (0, 0, run.generation)
    assert (await names(again), await service.store.num_quarantined("job")) == ([], 0)
    assert again.key != run.key
    assert await consume(again, again.open_session(0, 1)) == [0, 1, 2]
    new = await names(again)
    assert (len(new), set(new) & set(old)) == (3, set())
    later = await (await start()).load("job")
    assert (later.cursor.state, later.cursor.committed, await names(later)) == ("DONE", 3, new)


async def test_a_job_that_runs_is_not_deleted_before_it_is_cancelled(start: Start) -> None:
    service = await start()
    run = await submit(service)
    with pytest.raises(ConflictError, match="is RUNNING and not over: end it with `headrace job cancel job` first"):
        await service.delete("job")
    await run.cancel()
    await service.delete("job")
    assert service.jobs == service.nodes == {}


async def test_a_job_that_was_set_aside_can_be_deleted(start: Start) -> None:
    service = await start()
    await submit(service)
    await service.store.database.client.hset("headrace:{job}:job", "spec", "{}")
    again = await start()
    assert list(again.set_aside) == ["job"]
    await again.delete("job")
    assert (await again.store.jobs(), again.set_aside) == ([], {})


async def test_the_end_of_a_job_is_noted_with_its_figures(start: Start) -> None:
    service = await start()
    await finish(service)
    await service.tidying.note_ends(1e9)
    await service.tidying.note_ends(2e9)
    (note,) = await service.store.finished.read(["job"])
    expected = Summary(committed_steps=3, num_steps=3, samples=12, quarantined=0, num_shards=1, indexed_shards=1)
    assert (note.ended_s, note.summary) == (1e9, expected)


async def test_an_end_that_nobody_noted_is_noted_by_a_later_leader_and_the_job_dropped_in_its_time(start: Start) -> None:
    await finish(await start(), "over")
    service = await start()
    await submit(service, name="unreadable", join=False)
    await service.store.set_state("unreadable", "FAILED")
    await service.store.database.client.hset("headrace:{unreadable}:job", "spec", "{}")
    service = await start()
    await submit(service, name="runs", join=False)
    service.tidying._keep = KeepFinished(days=7)
    now_s = time.time()
    await service.tidying.look_through(now_s)
    over, unreadable, runs = await service.store.finished.read(await service.store.jobs())
    assert (over.ended_s, unreadable.ended_s, runs.ended_s) == (round(now_s), round(now_s), None)
    assert over.summary is not None
    assert (over.summary.samples, list(service.jobs)) == (12, ["runs"])
    await service.tidying.look_through(now_s + 6.9 * DAY_S)
    assert len(await service.store.jobs()) == 3
    await service.tidying.look_through(now_s + 7.1 * DAY_S)
    assert await service.store.jobs() == ["runs"]


async def test_the_ledger_of_a_job_that_runs_is_compacted(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.reorder_service.tidying.steps_per_page", lambda _: 2)
    service = await start()
    run = await submit(service)
    await consume(run, run.open_session(0, 1), stop=5)
    before = await names(run)
    await service.tidying.compact_ledgers()
    client = service.store.database.client
    assert await client.hget("headrace:{job}:job", "paged") == "2"
    assert json.loads(await client.hget("headrace:{job}:job", "border"))["sums"]["samples"] == 8
    assert await names(run) == before
    await consume(run, run.open_session(0, 1), stop=6)
    await service.tidying.compact_ledgers()
    assert await client.hget("headrace:{job}:job", "paged") == "4"
    await consume(run, run.open_session(0, 1))
    assert len(await names(run)) == 6


async def test_a_page_is_made_as_soon_as_two_are_in_the_list_whenever_it_was_looked_at_before(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.reorder_service.tidying.steps_per_page", lambda _: 2)
    service = await start()
    run = await submit(service)
    client = service.store.database.client
    for step, paged in ((3, None), (4, "2")):
        await consume(run, run.open_session(0, 1), stop=step)
        await service.tidying.compact_ledgers()
        assert await client.hget("headrace:{job}:job", "paged") == paged


async def test_tidying_lives_through_an_error(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headrace.reorder_service.tidying.TIDY_S", 0.001)
    service, failed, again = await start(), asyncio.Event(), asyncio.Event()

    async def fail(_: float) -> None:
        (again if failed.is_set() else failed).set()
        raise ValueError("bug")

    monkeypatch.setattr(service.tidying, "note_ends", fail)
    async with asyncio.timeout(20):
        await again.wait()
    assert [record.message for record in caplog.records].count("the store is not tidied up error=bug") == 1
