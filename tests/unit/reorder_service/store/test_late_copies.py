"""Commands of which the network held a copy back: what was done once is not done again, whatever has happened since."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headrace.errors import ConflictError, NotFoundError
from headrace.manifest import ShardInfo, ShardTable, Vocabulary
from headrace.reorder_service.store.finished_jobs import Summary
from headrace.reorder_service.store.job_change import change_job
from headrace.reorder_service.store.progress import StepRecord
from headrace.reorder_service.store.redis_database import Command
from headrace.reorder_service.store.state import StateStore

TABLE = ShardTable.of([ShardInfo(source=0, url="/d/a.tar", name="d/a")])
VOCABULARY = Vocabulary(size=9, image_token=1, audio_token=2)


async def reset_and_commit(store: StateStore) -> None:
    await store.rewind("job", 1)
    await commit(store, 1, 4)


async def end(store: StateStore) -> None:
    await store.set_state("job", "FAILED")
    await store.finished.note("job", 1e9, Summary(committed_steps=5))


async def go_back(store: StateStore) -> None:
    await store.compact_ledger("job", 2)
    await store.rewind("job", 1)


CHANGES: dict[str, tuple[Callable[[StateStore], Awaitable[Any]], Callable[[StateStore], Awaitable[Any]]]] = {
    "reset": (lambda store: store.rewind("job", 1), lambda store: commit(store, 1, 6)),
    "reset into a page": (go_back, lambda store: commit(store, 1, 6)),
    "commit": (lambda store: commit(store, 5, 6), lambda store: store.rewind("job", 5)),
    "page": (lambda store: store.compact_ledger("job", 2), reset_and_commit),
    "topology": (
        lambda store: store.set_topology("job", '{"a": 1}', "", "", 2),
        lambda store: store.set_topology("job", "", "", "", 3),
    ),
    "state": (lambda store: store.set_state("job", "FAILED", "x"), lambda store: store.set_state("job", "RUNNING")),
    "pause": (lambda store: store.set_paused("job", True), lambda store: store.set_paused("job", False)),
    "weights": (lambda store: store.set_mixture("job", [(9, [1.0])]), lambda store: store.set_mixture("job", [])),
    "membership": (lambda store: store.save_membership("job", "1"), lambda store: store.save_membership("job", "2")),
    "manifest": (
        lambda store: store.save_manifest("job", TABLE, VOCABULARY),
        lambda store: store.save_index("job", 0, 7, []),
    ),
    "deletion": (
        lambda store: store.finished.delete("job", even_unfinished=True),
        lambda store: store.create_job("job", "{}"),
    ),
    "note of its end": (end, lambda store: store.set_state("job", "INDEXING")),
    "creation": (lambda store: store.create_job("other", "{}"), lambda store: store.set_state("other", "DONE")),
}


async def commit(store: StateStore, start: int, stop: int) -> None:
    for step in range(start, stop):
        record = StepRecord(samples=(f"s{step}",), loss=1.0, step_s=1.0, data_wait_s=0.0)
        await store.commit_step("job", step, record, [])


async def everything(store: StateStore) -> dict[str, Any]:
    """All that the store holds, as the server itself would write it down."""
    client = store.database.client
    held: dict[str, Any] = {}
    async for key in client.scan_iter("headrace:*"):
        read = {
            "string": client.get,
            "hash": client.hgetall,
            "list": lambda key: client.lrange(key, 0, -1),
            "zset": lambda key: client.zrange(key, 0, -1, withscores=True),
        }
        held[key] = await read[await client.type(key)](key)
    return held


@pytest.mark.parametrize("what", CHANGES)
async def test_a_late_copy_does_nothing(store: StateStore, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    change, meanwhile = CHANGES[what]
    await store.create_job("job", "{}")
    await commit(store, 0, 5)
    client, sent = store.database.client, []
    execute = client.execute_command

    async def record(*args: Any, **options: Any) -> Any:
        if args[0] == "EVALSHA":
            sent.append(args)
        return await execute(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(client, "execute_command", record)
        await change(store)
    await meanwhile(store)
    expected = await everything(store)
    assert sent
    for args in sent:
        await client.execute_command(*args)
    assert await everything(store) == expected


async def test_a_change_whose_answer_was_lost_is_done_once(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the store's client does: it sends the same again."""
    await store.create_job("job", "{}")
    await commit(store, 0, 5)
    client = store.database.client
    execute = client.execute_command

    async def twice(*args: Any, **options: Any) -> Any:
        first = await execute(*args, **options)
        return await execute(*args, **options) if args[0] == "EVALSHA" else first

    with monkeypatch.context() as patch:
        patch.setattr(client, "execute_command", twice)
        await store.rewind("job", 3)
        await store.set_paused("job", True)
    record = await store.load_job("job")
    assert (record.generation, record.cursor, record.paused) == (2, 3, True)


async def test_a_change_that_has_read_half_of_another_one_is_prepared_again(store: StateStore) -> None:
    await store.create_job("job", "{}")
    failures = [ConflictError("half of it"), None]

    async def prepare() -> list[Command]:
        if (failure := failures.pop(0)) is not None:
            await store.set_paused("job", True)
            raise failure
        return [("HSET", "headrace:{job}:job", "topology", "another")]

    await change_job(store.database, "job", prepare)
    assert (await store.load_job("job")).topology_json == "another"
    assert failures == []


async def test_a_change_that_conflicts_with_what_stays_there_is_refused(store: StateStore) -> None:
    await store.create_job("job", "{}")

    async def prepare() -> list[Command]:
        raise ConflictError("all of it")

    with pytest.raises(ConflictError, match="all of it"):
        await change_job(store.database, "job", prepare)


async def test_a_job_that_there_is_not_cannot_change(store: StateStore) -> None:
    with pytest.raises(NotFoundError, match="no job 'job'"):
        await store.set_paused("job", True)
    assert await everything(store) == {"headrace:format": "5"}
