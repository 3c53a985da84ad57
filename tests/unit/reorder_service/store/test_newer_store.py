"""A store that a newer release of the same format has written: what is added is left alone, what cannot be is refused."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headrace.errors import ConflictError
from headrace.quarantine import Reason
from tests.unit.reorder_service.job_world import Preprocessor, Start, consume, submit

JOB = "headrace:{job}:"


async def add_fields(client: Any) -> None:
    """Write into every record what a newer release may: fields with the default of that release, and keys of its own."""
    for key in ("topology", "execution"):
        if text := await client.hget(f"{JOB}job", key):
            await client.hset(f"{JOB}job", key, json.dumps(json.loads(text) | {"later": {"x": None}}))
    spec, vocabulary = map(json.loads, await client.hmget(f"{JOB}job", "spec", "vocabulary"))
    spec["image"]["later"] = spec["later"] = 0
    await client.hset(f"{JOB}job", mapping={"spec": json.dumps(spec), "later": "7"})
    await client.hset(f"{JOB}job", "vocabulary", json.dumps(vocabulary | {"video_token": 5}))
    for n, text in enumerate(await client.lrange(f"{JOB}ledger", 0, -1)):
        entry = json.loads(text)
        entry["later"] = entry["sums"]["later"] = [1]
        for delivered in (entry["delivered"], entry["sums"]["delivered"]):
            for amounts in delivered.values():
                amounts.append(9)
        await client.lset(f"{JOB}ledger", n, json.dumps(entry))
    for n, text in enumerate(await client.lrange(f"{JOB}shards", 0, -1)):
        columns = json.loads(text)
        await client.lset(f"{JOB}shards", n, json.dumps([*columns, [0] * len(columns[0])]))
    for name, text in (await client.hgetall(f"{JOB}quarantine")).items():
        await client.hset(f"{JOB}quarantine", name, json.dumps(json.loads(text) | {"reason": "later", "later": 1}))
    for step, text in (await client.hgetall(f"{JOB}corrections")).items():
        document = json.loads(text)
        document["units"] = {unit: lines | {"later": 1} for unit, lines in document["units"].items()}
        await client.hset(f"{JOB}corrections", step, json.dumps(document | {"later": 1}))
    await client.set(f"{JOB}later", "x")


async def test_a_job_goes_on_from_it(start: Start) -> None:
    service = await start()
    Preprocessor(service=service, bad_rows={5}).join()
    run = await submit(service, join=False)
    await run.wait_ready()
    await run.set_topology(run.planned_spec.topology.changed(microbatches=2))
    assert await consume(run, run.open_session(0, 1), stop=2) == [0, 1]
    await add_fields(service.store.database.client)
    service = await start()
    assert not service.set_aside
    Preprocessor(service=service, bad_rows={5}).join()
    run = service.find("job")
    assert (run.cursor.committed, run.planned_spec.topology.microbatches) == (2, 2)
    assert run.cursor.progress.delivered["d"].samples in (7, 8)
    assert await consume(run, run.open_session(0, 1)) == [2, 3, 4, 5]
    entries = [record async for record in service.store.steps("job")]
    assert sorted(name for entry in entries for name in entry.samples) == sorted(f"d/a/{n}" for n in range(24) if n != 5)
    (refused,) = [item async for item in service.store.quarantine("job")]
    assert (refused.name, refused.reason) in {("d/a/5", Reason.CORRUPT_MEDIA), ("d/a/5", Reason.OTHER)}


async def state(client: Any) -> None:
    await client.hset(f"{JOB}job", "state", "SHARDING")


async def chosen(client: Any) -> None:
    text = await client.hget(f"{JOB}job", "chosen")
    await client.hset(f"{JOB}job", "chosen", json.dumps(json.loads(text) | {"curriculum": "long_first"}))


async def chosen_not_told(client: Any) -> None:
    await client.hdel(f"{JOB}job", "chosen")
    await add_fields(client)


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (state, "its state is 'SHARDING', which a newer release may know: run that one again"),
        (chosen, "curriculum: there is no such field, got 'long_first'; if a newer release has written it, run that one again"),
        (chosen_not_told, "there is no such field"),
    ],
)
async def test_what_a_job_uses_that_this_release_does_not_know_sets_it_aside_as_it_is(
    start: Start, write: Callable[[Any], Awaitable[None]], sentence: str
) -> None:
    service = await start()
    await submit(service)
    await write(service.store.database.client)
    before = await service.store.database.client.hgetall(f"{JOB}job")
    service = await start()
    assert sentence in service.set_aside["job"]
    assert await service.store.database.client.hgetall(f"{JOB}job") == before
    with pytest.raises(ConflictError, match="is set aside"):
        service.find("job")
