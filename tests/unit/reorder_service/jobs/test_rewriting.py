"""A store that is put back to an earlier moment while a job runs: what it lost is written again, and nobody is disturbed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.errors import NotFoundError, SupersededError
from headrace.reorder_service.jobs.job import JobRun
from headrace.reorder_service.jobs.rewriting import Loss, write_again
from headrace.reorder_service.jobs.sessions import Session
from headrace.topology_spec import TopologySpec
from tests.unit.reorder_service.job_world import Preprocessor, Start, commit, consume, names, submit, until

KEYS = {"headrace:{job}:" + what for what in ("job", "ledger", "quarantine", "window", "corrections")}


async def keep(run: JobRun) -> None:
    """Keep a copy of what the store has of the job now."""
    client = run._store.database.client
    for key in KEYS:
        await client.delete(f"kept:{key}")
        await client.copy(key, f"kept:{key}")


async def put_back(run: JobRun) -> None:
    """Make the store what it was at the latest `keep`."""
    client = run._store.database.client
    for key in KEYS:
        if not await client.copy(f"kept:{key}", key, replace=True):
            await client.delete(key)


async def job_at(start: Start, step: int, **fields: Any) -> tuple[JobRun, Session]:
    run = await submit(await start(), **fields)
    session = run.open_session(0, 1)
    await consume(run, session, stop=step)
    return run, session


async def go_on(run: JobRun, session: Session) -> None:
    """Commit what is left, in the session that there is."""
    while run.cursor.committed < 6:
        await run.commit(session, run.cursor.committed, commit(1.0))
    await until(lambda: run.cursor.is_over)


async def test_commits_that_the_store_has_lost_are_in_it_again_and_the_rank_goes_on(start: Start) -> None:
    run, session = await job_at(start, 1)
    await keep(run)
    for step in range(1, 4):
        await run.commit(session, step, commit(float(step)))
    before = await names(run)
    await put_back(run)
    assert len(await names(run)) == 1
    await go_on(run, session)
    assert session.over is None
    assert (run.cursor.state, run.cursor.committed) == ("DONE", 6)
    assert (await names(run))[:4] == before
    record = await run._store.load_job("job")
    assert (record.state, record.cursor, record.progress.samples) == ("DONE", 6, 24)
    assert record.progress.last_loss == 1.0


async def test_samples_that_were_refused_are_in_the_quarantine_again(start: Start) -> None:
    service = await start()
    Preprocessor(service=service, bad_rows={3, 9}).join()
    run = await submit(service, join=False)
    await run.wait_ready()
    session = run.open_session(0, 1)
    await keep(run)
    for step in range(5):
        await run.commit(session, step, commit())
    quarantined = [item async for item in run._store.quarantine("job")]
    await put_back(run)
    await go_on(run, session)
    assert len(quarantined) >= 1
    assert {item.name for item in quarantined} <= {item.name async for item in run._store.quarantine("job")}
    assert len(await names(run)) == 6


async def test_a_pause_a_topology_and_weights_that_the_store_has_lost_are_in_it_again(start: Start) -> None:
    run, _ = await job_at(start, 2)
    await keep(run)
    await run.set_topology(TopologySpec(replicas=1, microbatches=2))
    await run.set_weights(5, {"d": 1.0})
    await run.pause(True)
    session = run.open_session(0, 1)
    await put_back(run)
    await consume(run, session, stop=3)
    record = await run._store.load_job("job")
    assert (record.generation, record.paused, record.cursor) == (2, True, 3)
    assert record.mixture == ((5, (1.0,)),)
    assert (await start()).find("job").planned_spec.topology == run.planned_spec.topology


async def test_a_reset_that_the_store_has_lost_is_done_again(start: Start) -> None:
    run, _ = await job_at(start, 4)
    await keep(run)
    await run.rewind(1)
    session = run.open_session(0, 1)
    await consume(run, session, stop=2)
    await put_back(run)
    await go_on(run, session)
    record = await run._store.load_job("job")
    assert (record.generation, record.cursor, len(await names(run))) == (2, 6, 6)
    assert session.over is None


async def test_a_store_that_is_further_back_than_memory_reaches_sets_the_job_back(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks come back with their checkpoints, and commit again what they have trained."""
    monkeypatch.setattr("headrace.reorder_service.jobs.cursor.RECENT_PLANS", 2)
    run, _ = await job_at(start, 1)
    await keep(run)
    await consume(run, run.open_session(0, 1), stop=4)
    before = await names(run)
    session = run.open_session(0, 1)
    await put_back(run)
    await run.commit(session, 4, commit())
    assert isinstance(session.over, SupersededError)
    assert "set back from step 4 by its store" in str(session.over)
    assert run.cursor.committed == 1
    assert await consume(run, run.open_session(0, 1)) == [1, 2, 3, 4, 5]
    assert (await names(run))[:4] == before


async def test_a_store_that_is_as_it_was_is_left_alone(start: Start) -> None:
    run, _ = await job_at(start, 3)
    before = await run._store.load_job("job")
    assert await write_again(run, run._store) is Loss.NOTHING
    assert await run._store.load_job("job") == before
    assert len(await names(run)) == 3


async def test_a_job_that_the_store_has_lost_as_a_whole_is_dropped_and_may_be_submitted_again(start: Start) -> None:
    service = await start()
    run = await submit(service)
    session = run.open_session(0, 1)
    await consume(run, session, stop=2)
    client = run._store.database.client
    await client.delete("headrace:jobs", *KEYS)
    service.store.database.put_back.set()
    await until(lambda: session.over is not None)
    assert "if the store has lost it, submit it again" in str(session.over)
    with pytest.raises(NotFoundError, match=r"no job 'job' here; there are: none; .*if the store has lost it, submit it again"):
        service.find("job")
    again = await service.submit(run.spec.to_json())
    await again.wait_ready()
    assert again is not run
    assert (again.cursor.committed, again.cursor.uid != run.cursor.uid) == (0, True)
    assert await consume(again, again.open_session(0, 1)) == [0, 1, 2, 3, 4, 5]


async def test_a_job_whose_failure_cannot_be_saved_since_the_store_has_lost_it_does_not_flood_the_store(start: Start) -> None:
    service = await start()
    run = await submit(service, join=False)
    client = run._store.database.client
    await client.delete(*KEYS)
    before = (await client.info("stats"))["total_commands_processed"]
    Preprocessor(service=service).join()  # lists the shards, which the store refuses to keep
    await asyncio.sleep(0.3)  # in which the store would answer a thousand commands
    assert (await client.info("stats"))["total_commands_processed"] - before < 50
    async with asyncio.timeout(5):
        await run.stop()


async def test_a_job_that_is_over_is_over_again_where_the_store_has_lost_that(start: Start) -> None:
    run, session = await job_at(start, 4)
    await keep(run)
    await go_on(run, session)
    await put_back(run)
    run._store.database.put_back.set()
    async with asyncio.timeout(10):
        while (await run._store.load_job("job")).state != "DONE":  # noqa: ASYNC110 - polls a real server
            await asyncio.sleep(0.01)
    assert len(await names(run)) == 6


async def test_a_record_that_is_damaged_when_the_store_comes_back_keeps_no_other_job_from_being_written_again(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    service = await start()
    damaged = await submit(service, name="damaged")
    run = await submit(service, join=False)
    await run.wait_ready()
    await keep(run)
    await consume(run, run.open_session(0, 1), stop=2)
    for _ in range(2):  # the watch goes on
        await damaged._store.database.client.hset("headrace:{damaged}:job", "mixture", "{")
        await put_back(run)
        assert len(await names(run)) == 0
        service.store.database.put_back.set()
        async with asyncio.timeout(10):
            while len(await names(run)) < 2:  # noqa: ASYNC110 - polls a real server
                await asyncio.sleep(0.01)
    assert caplog.text.count("what the store has lost is not written again job=damaged") == 2
