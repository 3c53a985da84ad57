"""Good samples stand in for refused ones where a source asks for it, and no other sample's place changes."""

from __future__ import annotations

from typing import Any

from headrace.reorder_service.service import ReorderService
from headrace.reorder_service.store.progress import StepRecord
from tests.unit.reorder_service.job_world import ROWS, Preprocessor, Start, consume, submit, told_steps

BAD_ROWS = (3, 4, ROWS - 1)


async def records(service: ReorderService, name: str, *, on_bad: str, bad_rows: Any = BAD_ROWS) -> list[StepRecord]:
    """Of a whole epoch."""
    preprocessor = Preprocessor(service=service, bad_rows=bad_rows)
    preprocessor.join()
    run = await submit(service, join=False, name=name, sources=[{"path": "/d", "on_bad": on_bad}])
    await run.wait_ready()
    await consume(run, run.open_session(0, 1))
    return [record async for record in service.store.steps(name)]


async def test_every_global_batch_is_full_and_every_other_sample_stays_where_it_is(start: Start) -> None:
    service = await start()
    skipped = await records(service, "skip", on_bad="skip")
    substituted = await records(service, "substitute", on_bad="substitute")
    assert [record.samples for record in substituted] == [record.samples for record in skipped]
    assert all(len(record.samples) + len(record.substitutes) == 4 for record in substituted)
    assert any(len(record.samples) < 4 for record in skipped)
    assert sorted(name for record in substituted for name in record.substitutes) == ["d/a/0", "d/a/5", "d/a/5"]
    assert sum(record.delivered["d"].samples for record in substituted) == ROWS
    assert sum(record.delivered["d"].refused for record in substituted) == len(BAD_ROWS)
    assert await service.store.num_quarantined("substitute") == len(BAD_ROWS)


async def test_a_shard_without_a_good_sample_has_no_substitute(start: Start) -> None:
    service = await start()
    empty = await records(service, "job", on_bad="substitute", bad_rows=range(ROWS))
    assert all(not record.samples and not record.substitutes for record in empty)
    assert "every sample of job 'job' was refused" in service.find("job").cursor.message


async def test_who_takes_over_has_the_same_substitutes(start: Start) -> None:
    service = await start()
    Preprocessor(service=service, bad_rows=BAD_ROWS).join()
    run = await submit(service, join=False, window=6, sources=[{"path": "/d", "on_bad": "substitute"}])
    before = await told_steps(run.open_session(0, 1), range(6))
    service = await start()
    Preprocessor(service=service, bad_rows=range(ROWS)).join()  # it would refuse them all
    run = service.find("job")
    after = await told_steps(run.open_session(0, 1), range(6))
    assert [after[n].substitutes for n in range(6)] == [before[n].substitutes for n in range(6)]
    assert sum(len(step.substitutes) for step in before.values()) == len(BAD_ROWS)
