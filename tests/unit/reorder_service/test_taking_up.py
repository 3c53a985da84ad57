"""What a leader takes up: all jobs but those whose records cannot be read, as soon as the store answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from headrace import rpc
from headrace.errors import ConflictError, UnavailableError
from headrace.reorder_service import server as process
from headrace.reorder_service.jobs.stopping import stop_task
from headrace.reorder_service.service import ReorderService
from headrace.reorder_service.store.state import StateStore
from headrace.v1 import jobs_pb2, jobs_pb2_grpc
from tests.redis_server import RedisServer
from tests.unit.reorder_service.job_world import Start, submit
from tests.wire import free_ports

PATIENCE_S = 20.0
JOB = "headrace:{bad}:job"


@pytest.fixture
def store_server(tmp_path: Path) -> Iterator[RedisServer]:
    (tmp_path / "redis").mkdir()
    server = RedisServer(tmp_path / "redis")
    server.start()
    yield server
    server.kill()


DAMAGE: dict[str, Callable[[Any], Any]] = {
    "no record": lambda client: client.delete(JOB),
    "no field": lambda client: client.hdel(JOB, "uid"),
    "no number": lambda client: client.hset(JOB, "cursor", "x"),
    "no JSON": lambda client: client.hset(JOB, "mixture", "["),
    "other JSON": lambda client: client.hset(JOB, "mixture", "[7]"),
    "no spec": lambda client: client.hset(JOB, "spec", "{}"),
    "no counts": lambda client: client.set("headrace:{bad}:indexed", "-0000005"),
    "no list": lambda client: client.set("headrace:{bad}:ledger", "x"),
    "no membership": lambda client: client.set("headrace:{bad}:nodes", "{}"),
    "no key": lambda client: client.hset(JOB, "key", "zz"),
}


@pytest.mark.parametrize("damage", DAMAGE)
async def test_a_record_that_cannot_be_read_is_set_aside_and_named_and_every_other_job_goes_on(start: Start, damage: str) -> None:
    service = await start()
    await submit(service, name="bad")
    await submit(service, name="good", join=False)
    client = service.store.database.client
    await client.hset(JOB, "cursor", 1)
    await DAMAGE[damage](client)
    again = await start()
    assert again.running_jobs() == ["good"]
    assert list(again.set_aside) == ["bad"]
    with pytest.raises(ConflictError, match="job 'bad' is set aside, since its record"):
        again.find("bad")


async def test_a_name_whose_record_is_gone_is_free_for_a_new_job(start: Start) -> None:
    service = await start()
    await submit(service)
    await service.store.database.client.delete("headrace:{job}:job")
    again = await start()
    assert list(again.set_aside) == ["job"]
    run = await submit(again)
    assert (run.cursor.state, list(again.set_aside), await again.store.jobs()) == ("RUNNING", [], ["job"])


async def test_a_name_that_is_set_aside_takes_no_new_job(start: Start) -> None:
    service = await start()
    await submit(service)
    await service.store.database.client.hdel("headrace:{job}:job", "uid")
    with pytest.raises(ConflictError, match="set aside"):
        await submit(await start())


@contextlib.asynccontextmanager
async def serving(url: str) -> Any:
    """A reorder service as a process runs it: its endpoint, and its task."""
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    task = asyncio.create_task(process.serve(endpoint, url))
    try:
        yield endpoint, task
    finally:
        await stop_task(task)


async def until_serving(endpoint: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(rpc.is_serving, endpoint, "headrace.v1.Jobs"):  # noqa: ASYNC110 - a real server
            await asyncio.sleep(0.02)


async def test_what_is_set_aside_is_listed(store_server: RedisServer) -> None:
    with redis.Redis(port=store_server.port) as client:
        client.rpush("headrace:jobs", "bad")
        client.set("headrace:format", "5")
    async with serving(store_server.url) as (endpoint, _), rpc.aio_channel(endpoint) as channel:
        await until_serving(endpoint)
        (page,) = [page async for page in jobs_pb2_grpc.JobsStub(channel).List(jobs_pb2.ListRequest())]
        (status,) = page.jobs
        assert (status.job, status.state) == ("bad", jobs_pb2.JOB_STATE_SET_ASIDE)
        assert "no job 'bad'" in status.message


async def test_a_leader_waits_for_a_store_that_goes_away_while_it_takes_up_jobs(
    store_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await StateStore.open(store_server.url)
    for job in ("a", "b"):
        assert await store.create_job(job, "{}")  # set aside, when it is read
    await store.close()
    load, asked = StateStore.load_job, []

    async def load_job(self: StateStore, job: str) -> Any:
        asked.append(job)
        if len(asked) == 2:
            store_server.kill()
        if len(asked) == 3:
            store_server.start()
        return await load(self, job)

    monkeypatch.setattr(StateStore, "load_job", load_job)
    async with serving(store_server.url) as (endpoint, task):
        await until_serving(endpoint)
        assert asked == ["a", "b", "b"]
        assert not task.done()


async def test_a_leader_that_cannot_take_up_ends_even_where_a_cancellation_is_swallowed(
    store_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def keep_leading(*_: object) -> None:
        for _ in range(3):  # as the store's client does in the middle of a command
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        await asyncio.Event().wait()

    async def fails(_: ReorderService) -> None:
        raise ValueError("bug")

    monkeypatch.setattr(process, "keep_leading", keep_leading)
    monkeypatch.setattr(ReorderService, "start", fails)
    async with serving(store_server.url) as (_, task), asyncio.timeout(PATIENCE_S):
        with pytest.raises(ValueError, match="bug"):
            await task


async def test_one_that_is_replaced_while_it_takes_up_lets_go(store_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, led = asyncio.Event(), []

    async def keep_leading(*_: object) -> None:
        led.append("a term")
        if len(led) == 1:
            await begun.wait()
        else:
            await asyncio.Event().wait()

    async def start(_: ReorderService) -> None:
        begun.set()
        if len(led) == 1:
            await asyncio.Event().wait()

    monkeypatch.setattr(process, "keep_leading", keep_leading)
    monkeypatch.setattr(ReorderService, "start", start)
    async with serving(store_server.url) as (endpoint, _):
        await until_serving(endpoint)
        assert len(led) == 2


async def test_an_embedded_store_that_has_ended_ends_its_leader(start: Start) -> None:
    service = await start()
    embedded = service.store.database._embedded
    assert embedded is not None
    assert embedded._process is not None
    embedded._process.kill()
    embedded._process.wait()
    with pytest.raises(UnavailableError, match="has ended"):
        await ReorderService(service.store).start()
