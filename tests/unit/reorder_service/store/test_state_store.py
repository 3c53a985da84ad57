"""The state store: one behaviour, whichever server stands behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import ConflictError, JobFailedError, NotFoundError, UnavailableError, UserError
from headrace.manifest import PAGE_SHARDS, UNCOUNTED, ShardInfo, ShardTable, Vocabulary
from headrace.message_codec import probe_message
from headrace.quarantine import Reason, Rejected
from headrace.reorder_service.store import state, step_ledger
from headrace.reorder_service.store.progress import Progress, StepRecord
from headrace.reorder_service.store.redis_database import Command
from headrace.reorder_service.store.state import StateStore
from headrace.sample import Probe, SampleRef

VOCABULARY = Vocabulary(size=100, image_token=1, audio_token=2)
SHARDS = [ShardInfo(source=0, url="/d/a.tar", name="d/a"), ShardInfo(source=1, url="s3://b/ü.tar", name="b/ü")]


def step_record(*samples: str, loss: float = 1.0) -> StepRecord:
    return StepRecord(samples=samples, loss=loss, step_s=0.5, data_wait_s=0.25)


def rejected(name: str, sample_id: int | None = 3) -> Rejected:
    return Rejected(name=name, reason=Reason.TOO_LARGE, detail="9 > 8", sample_id=sample_id)


async def make_job(store: StateStore, job: str = "job", num_steps: int = 0) -> None:
    await store.create_job(job, "{}")
    for step in range(num_steps):
        await store.commit_step(job, step, step_record(f"s{step}a", f"s{step}b"), [])


async def ledger(store: StateStore, job: str = "job") -> list[tuple[int, tuple[str, ...]]]:
    return [(entry.step, entry.samples) async for entry in store.ledger(job)]


async def test_a_new_job_is_empty_and_is_created_once(store: StateStore) -> None:
    assert await store.jobs() == []
    assert await store.create_job("b", '{"x": 1}')
    assert await store.create_job("a", "{}")
    assert not await store.create_job("b", '{"x": 2}')
    assert await store.jobs() == ["b", "a"]
    record = await store.load_job("b")
    assert (record.spec_json, record.state, record.message) == ('{"x": 1}', "INDEXING", "")
    assert (record.cursor, record.progress.samples, record.vocabulary) == (0, 0, None)
    assert [len(column) for column in await store.load_manifest("b")] == [0, 0]
    with pytest.raises(NotFoundError, match="no job 'c'"):
        await store.load_job("c")


async def test_manifest_index_and_state_come_back(store: StateStore) -> None:
    await make_job(store)
    await store.save_manifest("job", ShardTable.of([SHARDS[0]] * 5), VOCABULARY)
    await store.save_index("job", 4, 3, [])
    await store.save_manifest("job", ShardTable.of(SHARDS), VOCABULARY)
    await store.save_index("job", 1, 7, [rejected("b/ü/k", None)])
    await store.set_state("job", "FAILED", "no data")
    record = await store.load_job("job")
    shards, num_rows = await store.load_manifest("job")
    assert (list(shards), num_rows.tolist(), record.vocabulary) == (SHARDS, [UNCOUNTED, 7], VOCABULARY)
    assert (record.state, record.message) == ("FAILED", "no data")
    assert [item async for item in store.quarantine("job")] == [rejected("b/ü/k", None)]


async def test_a_manifest_of_many_pages_comes_back_whole(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_COUNTS_PAGE", 7)
    await make_job(store)
    many = ShardTable.of(replace(SHARDS[n % 2], name=f"d/{n}") for n in range(2 * PAGE_SHARDS + 1))
    await store.save_manifest("job", many, VOCABULARY)
    expected = np.full(len(many), UNCOUNTED)
    for shard, num_rows in [(434, 1), (0, 0), (17, 2**31 - 1), (5, 100_000)]:
        await store.save_index("job", shard, num_rows, [])
        expected[shard] = num_rows
    shards, counts = await store.load_manifest("job")
    assert list(shards) == list(many)
    assert counts.tolist() == expected.tolist()


async def test_a_shard_may_have_any_number_of_damaged_entries(store: StateStore) -> None:
    await make_job(store)
    await store.save_index("job", 0, 1, (rejected(f"d/{n}", None) for n in range(9_001)))
    assert await store.num_quarantined("job") == 9_001


@pytest.mark.parametrize("num_rows", [-5, 2**31, 2**36])
async def test_a_number_of_rows_that_is_none_is_not_kept(store: StateStore, num_rows: int) -> None:
    await make_job(store)
    await store.save_manifest("job", ShardTable.of(SHARDS), VOCABULARY)
    with pytest.raises(JobFailedError, match=f"{num_rows} rows"):
        await store.save_index("job", 1, num_rows, [rejected("x")])
    assert (await store.load_manifest("job"))[1].tolist() == [UNCOUNTED, UNCOUNTED]
    assert await store.num_quarantined("job") == 0


async def test_a_manifest_that_was_cut_off_has_not_been_saved(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await make_job(store)
    table = ShardTable.of(SHARDS)
    await store.save_manifest("job", table, VOCABULARY)
    write, left = store.database.write, iter(range(2))

    async def cut_off(*commands: Command, when: Sequence[Command] = ()) -> bool:
        if next(left, None) is None:
            raise UnavailableError("gone")
        return await write(*commands, when=when)

    with monkeypatch.context() as patch:
        patch.setattr(store.database, "write", cut_off)
        with pytest.raises(UnavailableError):
            await store.save_manifest("job", ShardTable.of(SHARDS * PAGE_SHARDS), VOCABULARY)
    assert (await store.load_job("job")).vocabulary is None
    await store.save_manifest("job", table, VOCABULARY)
    assert list((await store.load_manifest("job"))[0]) == SHARDS


async def test_commits_are_in_order_or_refused(store: StateStore) -> None:
    await make_job(store, num_steps=1)
    with pytest.raises(ConflictError, match="step 2 "):
        await store.commit_step("job", 2, step_record("x"), [rejected("y")])
    with pytest.raises(ConflictError, match="step 0 "):
        await store.commit_step("job", 0, step_record("x"), [rejected("y")])
    record = await store.load_job("job")
    assert (record.cursor, record.progress.samples) == (1, 2)
    assert await ledger(store) == [(0, ("s0a", "s0b"))]
    assert await store.num_quarantined("job") == 0


async def test_repeating_the_latest_commit_is_harmless(store: StateStore) -> None:
    """Its answer may have been lost between the server and us."""
    await make_job(store, num_steps=1)
    for _ in range(3):
        await store.commit_step("job", 1, step_record("x", loss=float("nan")), [rejected("y")])
    assert (await store.load_job("job")).cursor == 2
    assert len(await ledger(store)) == 2
    assert await store.num_quarantined("job") == 1


async def test_of_concurrent_writers_one_commits(store: StateStore) -> None:
    await make_job(store)
    commits = [store.commit_step("job", 0, step_record(f"w{n}"), []) for n in range(8)]
    results = await asyncio.gather(*commits, return_exceptions=True)
    assert [type(result) for result in results].count(ConflictError) == 7
    record = await store.load_job("job")
    assert (record.cursor, record.progress.samples, len(await ledger(store))) == (1, 1, 1)


async def test_the_ledger_pages_through_any_number_of_steps(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_ledger, "_MOST_ENTRIES", 3)
    await make_job(store, num_steps=7)
    assert [step for step, _ in await ledger(store)] == list(range(7))
    assert [record.samples[0] async for record in store.steps("job", 5)] == ["s5a", "s6a"]


@pytest.mark.parametrize("step", [0, 1, 3])
async def test_rewinding_undoes_later_commits_and_their_quarantine_and_revives_the_job(store: StateStore, step: int) -> None:
    await make_job(store)
    await store.save_index("job", 0, 9, [rejected("damaged shard", None)])
    for n in range(3):
        await store.commit_step("job", n, step_record(f"s{n}"), [rejected(f"bad{n}")])
    await store.set_state("job", "DONE")
    await store.rewind("job", step)
    record = await store.load_job("job")
    assert (record.cursor, record.progress.samples, record.state) == (step, step, "RUNNING")
    assert await ledger(store) == [(n, (f"s{n}",)) for n in range(step)]
    names = sorted([item.name async for item in store.quarantine("job")])
    assert names == [*(f"bad{n}" for n in range(step)), "damaged shard"]
    await store.commit_step("job", step, step_record("again"), [])
    assert (await ledger(store))[-1] == (step, ("again",))


@pytest.mark.timeout(60)
async def test_rewinding_undoes_a_large_quarantine_in_few_commands(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await make_job(store, num_steps=1)
    await store.commit_step("job", 1, step_record("s"), (rejected(f"bad{n}") for n in range(9_001)))
    read, asked = store.database.read, []

    async def count(command: Any) -> Any:
        asked.append(command)
        return await read(command)

    monkeypatch.setattr(store.database, "read", count)
    await store.rewind("job", 1)
    assert await store.num_quarantined("job") == 0
    assert len(asked) < 30


async def test_a_sample_that_every_epoch_refuses_stays_in_quarantine_when_the_second_epoch_is_undone(store: StateStore) -> None:
    await make_job(store)
    await store.commit_step("job", 0, step_record("a"), [rejected("bad", 1)])
    await store.commit_step("job", 1, step_record("a"), [rejected("bad", 5)])
    await store.rewind("job", 1)
    assert [item async for item in store.quarantine("job")] == [rejected("bad", 1)]


async def test_everything_survives_closing_and_opening_again(store_url: str) -> None:
    store = await StateStore.open(store_url)
    await make_job(store, num_steps=2)
    await store.close()
    again = await StateStore.open(store_url)
    assert (await again.load_job("job")).cursor == 2
    assert len(await ledger(again)) == 2
    await again.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgres://x/y", "neither redis://"),
        ("nonsense", "neither redis://"),
        ("redis://127.0.0.1:1/0", "no Redis server answers at redis://127.0.0.1:1/0"),
        ("embedded:/proc/no/such", "cannot use /proc/no/such"),
    ],
)
async def test_a_store_that_cannot_be_had_is_one_sentence(url: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        await StateStore.open(url)
    assert "\n" not in str(caught.value)


async def test_equal_records_come_back_equal(store: StateStore) -> None:
    await make_job(store)
    record = replace(step_record("ä/ö/1", "b"), loss=2.5)
    await store.commit_step("job", 0, record, [])
    assert [found async for found in store.steps("job")] == [record]


async def test_a_store_of_another_release_is_refused(tmp_path: Path) -> None:
    url = f"embedded:{tmp_path / 'store'}"
    store = await StateStore.open(url)
    await store.create_job("j", "{}")
    await store.database.client.set("headrace:format", "0")
    await store.close()
    with pytest.raises(ConflictError, match="another release"):
        await StateStore.open(url)


async def test_the_sums_of_all_steps_are_read_from_the_last_one(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await make_job(store)
    for step, loss in enumerate((float("nan"), 4.0, 2.0)):
        await store.commit_step("job", step, step_record("a", "b", loss=loss), [])
    monkeypatch.setattr(StateStore, "steps", lambda *_: pytest.fail("every step was read"))
    sums = (await store.load_job("job")).progress
    assert sums == Progress(samples=6, first_loss=4.0, last_loss=2.0, step_s=1.5, data_wait_s=0.75)
    await store.rewind("job", 2)
    assert (await store.load_job("job")).progress.last_loss == 4.0


async def test_what_was_probed_is_kept_until_its_step_is_committed_or_undone(store: StateStore) -> None:
    await make_job(store)
    probes = {7: Probe(name="d/ü", num_tokens=9, num_targets=4, image_patches=(16, 4), mel_frames=(100,))}
    substitutes = [SampleRef(sample_id=8, shard=0, row=3)]
    for step in (0, 1):
        answers = [probe_message(sample_id, probe) for sample_id, probe in probes.items()]
        await store.save_probes("job", step, answers, [rejected("bad", 8)], substitutes)
    assert await store.load_probes("job", 0) == (probes, [rejected("bad", 8)], substitutes)
    await store.commit_step("job", 0, step_record("d/ü"), [])
    assert await store.load_probes("job", 0) is None
    assert await store.load_probes("job", 1) is not None
    await store.rewind("job", 0)
    assert await store.load_probes("job", 1) is None


async def test_every_reset_and_every_topology_begins_a_generation(store: StateStore) -> None:
    await make_job(store, num_steps=2)
    assert await store.set_topology("job", '{"replicas": 3}', '{"chunks": 2}', "{}", 2)
    assert not await store.set_topology("job", '{"replicas": 4}', "", "{}", 2)
    await store.rewind("job", 1)
    record = await store.load_job("job")
    assert (record.generation, record.topology_json, record.execution_json) == (3, '{"replicas": 3}', '{"chunks": 2}')
    assert record.cursor == 1


async def test_a_pause_survives(store: StateStore) -> None:
    await make_job(store)
    await store.set_paused("job", True)
    assert (await store.load_job("job")).paused
    await store.set_paused("job", False)
    assert not (await store.load_job("job")).paused


async def test_a_cancellation_that_the_client_drops_is_carried_out(store: StateStore) -> None:
    """`asyncio.wait_for` drops one that comes together with the answer, before Python 3.12."""
    begun = asyncio.Event()

    async def drops() -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "the answer"
        return ""

    task = asyncio.create_task(store.database.read(drops()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
