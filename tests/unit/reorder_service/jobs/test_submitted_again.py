"""What becomes of a failed job that is submitted again."""

from __future__ import annotations

import asyncio

from headrace.reorder_service.jobs.job import JobRun
from headrace.reorder_service.service import ReorderService
from tests.unit.reorder_service.job_world import ROWS, Preprocessor, Start, consume, names, submit, until


async def fail_on_an_empty_shard(service: ReorderService, preprocessor: Preprocessor) -> JobRun:
    """A job that is paused before it finds that its only shard has no row."""
    run = await submit(service, join=False, global_batch=4)
    await run.pause(True)
    preprocessor.rows = 0
    preprocessor.join()
    await until(lambda: run.cursor.state == "FAILED")
    assert "is refused (archive_truncated: cut off)" in run.cursor.message
    assert await service.store.num_quarantined("job") == 1
    return run


async def test_all_ranks_may_submit_a_job_without_a_sample_again_when_its_shards_are_mended(start: Start) -> None:
    service = await start()
    run = await fail_on_an_empty_shard(service, preprocessor := Preprocessor(service=service))
    preprocessor.rows = ROWS
    assert await asyncio.gather(*(submit(service, join=False) for _ in range(4))) == [run] * 4
    await run.wait_ready()
    assert run.paused, "it is still the job that was paused"
    await run.pause(False)
    assert await consume(run, run.open_session(0, 1)) == list(range(ROWS // 4))
    assert len({name for step in await names(run) for name in step}) == ROWS
    assert await service.store.num_quarantined("job") == 0
    assert not run.manifest.damaged


async def test_a_leader_that_takes_over_before_the_shards_are_listed_lists_them(start: Start) -> None:
    service = await start()
    run = await fail_on_an_empty_shard(service, preprocessor := Preprocessor(service=service))
    preprocessor.answers = False
    await run.resubmit()
    again = await (await start()).load("job")
    assert again.cursor.state == "INDEXING"
    assert again.manifest.vocabulary is None


async def test_a_job_whose_shards_are_not_mended_fails_again_and_so_does_it_under_another_leader(start: Start) -> None:
    service = await start()
    run = await fail_on_an_empty_shard(service, Preprocessor(service=service))
    await run.resubmit()
    await until(lambda: run.cursor.state == "FAILED")
    assert await service.store.num_quarantined("job") == 1
    again = await (await start()).load("job")
    assert (again.cursor.state, again.cursor.message) == ("FAILED", run.cursor.message)


async def test_a_job_whose_only_committed_step_was_refused_keeps_its_ledger(start: Start) -> None:
    service = await start()
    Preprocessor(service=service, bad_rows=range(ROWS)).join()
    run = await submit(service, join=False, steps=1)
    await consume(run, run.open_session(0, 1))
    for _ in range(2):
        await until(lambda: run.cursor.state == "FAILED")
        assert "every sample of job 'job' was refused" in run.cursor.message
        assert await names(run) == [()]
        assert await service.store.num_quarantined("job") >= 4
        assert await submit(service, join=False, steps=1) is run
