"""Jobs that are over: what the store tells of them at once, and that nothing is left of one that is deleted."""

from __future__ import annotations

import pytest

from headrace.errors import ConflictError, NotFoundError
from headrace.manifest import ShardInfo, ShardTable, Vocabulary
from headrace.quarantine import Reason, Rejected
from headrace.reorder_service.store.finished_jobs import JobNote, Summary
from headrace.reorder_service.store.progress import StepRecord
from headrace.reorder_service.store.state import StateStore
from tests.small_jpeg import small_jpeg

SUMMARY = Summary(committed_steps=5, num_steps=9, samples=10, quarantined=1, num_shards=1, indexed_shards=1)


async def make_job(store: StateStore, job: str, state: str = "DONE") -> None:
    """It has something of everything that a job may have."""
    await store.create_job(job, "{}")
    table = ShardTable.of([ShardInfo(source=0, url="/d/a.tar", name="d/a")])
    await store.save_manifest(job, table, Vocabulary(size=9, image_token=1, audio_token=2))
    await store.save_index(job, 0, 7, [Rejected(name="d/a/9", reason=Reason.TOO_LARGE, detail="")])
    shown = Rejected(name="d/a/8", reason=Reason.CORRUPT_MEDIA, detail="", thumbnail=small_jpeg())
    for step in range(5):
        await store.commit_step(job, step, StepRecord(samples=("a", "b"), loss=1.0, step_s=1.0, data_wait_s=0.0), [shown])
    await store.compact_ledger(job, 2)
    await store.save_probes(job, 5, [], [], [])
    await store.save_correction(job, 4, "{}")
    await store.save_membership(job, "{}")
    await store.set_state(job, state)


async def keys(store: StateStore, job: str) -> set[str]:
    return {key async for key in store.database.client.scan_iter(f"headrace:{{{job}}}:*")}


async def test_nothing_is_left_of_a_deleted_job_and_its_name_is_free(store: StateStore) -> None:
    await make_job(store, "other")
    everything = await keys(store, "other")
    await make_job(store, "job")
    assert len(await keys(store, "job")) == len(everything) == 10
    await store.finished.delete("job")
    assert await keys(store, "job") == set()
    assert await keys(store, "other") == everything
    assert await store.jobs() == ["other"]
    assert await store.create_job("job", "{}")
    record = await store.load_job("job")
    assert (record.cursor, record.state, record.vocabulary) == (0, "INDEXING", None)


async def test_jobs_that_are_not_over_are_found_among_any_number(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.reorder_service.store.finished_jobs._LOOKED_AT", 3)
    states = ["DONE", "RUNNING", "FAILED", "CANCELLED", "INDEXING", "DONE", "?"]
    for place, state in enumerate(states):
        await store.create_job(f"ü{place}", "{}")
        await store.set_state(f"ü{place}", state)
    await store.database.client.rpush("headrace:jobs", "no record", "nor this one")
    assert await store.finished.others() == ["ü1", "ü4", "ü6", "no record", "nor this one"]


@pytest.mark.parametrize("state", ["RUNNING", "INDEXING"])
async def test_a_job_that_is_not_over_is_not_deleted(store: StateStore, state: str) -> None:
    await make_job(store, "job", state)
    with pytest.raises(ConflictError, match=f"job 'job' is {state} and not over: end it with `headrace job cancel job`"):
        await store.finished.delete("job")
    assert (await store.load_job("job")).cursor == 5
    await store.finished.delete("job", even_unfinished=True)
    assert await store.jobs() == []


async def test_a_job_that_there_is_not_cannot_be_deleted_or_noted(store: StateStore) -> None:
    with pytest.raises(NotFoundError, match="no job 'job'"):
        await store.finished.delete("job")
    await store.finished.note("job", 1.0, SUMMARY)
    assert await keys(store, "job") == set()


async def test_a_name_without_a_record_can_be_deleted(store: StateStore) -> None:
    await make_job(store, "job")
    await store.database.client.delete("headrace:{job}:job")
    await store.finished.delete("job", even_unfinished=True)
    assert await keys(store, "job") == set()
    assert await store.jobs() == []


async def test_a_note_tells_of_a_job_without_loading_it(store: StateStore) -> None:
    await make_job(store, "job")
    (before,) = await store.finished.read(["job"])
    assert before == JobNote(job="job", state="DONE", message="", committed_steps=5, ended_s=None, summary=None)
    await store.finished.note("job", 1e9, SUMMARY)
    await store.finished.note("job", 2e9, SUMMARY)
    missing, noted = await store.finished.read(["missing", "job"])
    assert (missing.state, missing.is_over) == ("", False)
    assert (noted.ended_s, noted.summary) == (1e9, SUMMARY)


@pytest.mark.parametrize("how", ["reset", "submitted again", "by another release"])
async def test_a_job_that_goes_on_is_noted_anew_at_its_next_end(store: StateStore, how: str) -> None:
    await make_job(store, "job")
    await store.finished.note("job", 1e9, SUMMARY)
    if how == "reset":
        await store.rewind("job", 3)
    elif how == "submitted again":
        await store.set_state("job", "INDEXING")
    else:  # which leaves the note as it is
        await store.database.client.hset("headrace:{job}:job", mapping={"state": "DONE", "cursor": 6})
    (found,) = await store.finished.read(["job"])
    assert (found.ended_s, found.summary) == (None, None)


async def test_a_cancelled_job_keeps_nothing_of_steps_that_nobody_will_plan(store: StateStore) -> None:
    await make_job(store, "job", "CANCELLED")
    assert not {"headrace:{job}:window", "headrace:{job}:corrections"} & await keys(store, "job")


async def test_corrections_of_steps_committed_long_ago_are_dropped(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.reorder_service.store.state._KEPT_CORRECTIONS", 4)
    await store.create_job("job", "{}")
    for step in range(9):
        await store.save_correction("job", step, "{}")
        await store.commit_step("job", step, StepRecord(samples=(), loss=1.0, step_s=1.0, data_wait_s=0.0), [])
    assert await store.database.client.hkeys("headrace:{job}:corrections") == ["5", "6", "7", "8"]
