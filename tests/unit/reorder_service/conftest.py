"""Stores of both kinds, and a preprocessor that lives in the test's own event loop."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from headrace.processes import free_port
from headrace.reorder_service.service import ReorderService
from headrace.reorder_service.store.embedded_redis import server_binary
from headrace.reorder_service.store.state import StateStore
from tests.redis_server import RedisServer, make_store_user
from tests.unit.reorder_service.job_world import Start, end


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real server on a free port, as a user would name it."""
    port = free_port()
    folder = tmp_path_factory.mktemp("redis")
    server = subprocess.Popen(
        [server_binary(), "--port", str(port), "--dir", str(folder), "--appendonly", "yes", "--save", ""],
        stdout=subprocess.DEVNULL,
    )
    try:
        retry = Retry(ConstantBackoff(0.02), retries=300)
        with redis.Redis(port=port, retry=retry) as client:
            client.ping()
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.terminate()
        server.wait()


@pytest.fixture(params=["embedded", "redis"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store, for a user who may do no more than deployments let a reorder service do."""
    if request.param == "embedded":
        return f"embedded:{tmp_path / 'store'}"
    url: str = request.getfixturevalue("redis_url")
    with redis.Redis.from_url(url) as client:
        client.flushdb()
    return make_store_user(url, "of the tests")


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[StateStore]:
    opened = await StateStore.open(store_url)
    yield opened
    await opened.close()


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start a service on the test's store; the former one ends, as a process would."""
    running: list[ReorderService] = []

    async def start_service() -> ReorderService:
        if running:
            await end(running.pop())
        service = ReorderService(await StateStore.open(f"embedded:{tmp_path / 'store'}"))
        running.append(service)
        await service.start()
        return service

    yield start_service
    for service in running:
        await end(service)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis server of one test alone, which keeps every commit."""
    (tmp_path / "redis").mkdir()
    server = RedisServer(tmp_path / "redis")
    server.start()
    yield server
    server.kill()
