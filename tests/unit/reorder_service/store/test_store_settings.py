"""What a service says, when it starts, of a Redis that may forget commits."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import redis

from headrace.reorder_service.store.redis_database import Database
from tests.redis_server import RedisServer


async def said(url: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level(logging.INFO):
        await (await Database.open(url)).close()
    return [record.getMessage() for record in caplog.records if record.name == "headrace.reorder_service.store.redis_database"]


async def test_of_one_that_keeps_every_commit_nothing_is_said(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    assert await said(server.url, caplog) == []


async def test_what_lets_it_forget_is_named_with_the_remedy(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.config_set("appendfsync", "everysec")
        client.config_set("maxmemory-policy", "allkeys-lru")
    (message,) = await said(server.url, caplog)
    for words in ("appendfsync=everysec", "maxmemory-policy=allkeys-lru", "--appendfsync always --maxmemory-policy noeviction"):
        assert words in message
    assert "appendonly" not in message


async def test_one_that_does_not_tell_its_settings_is_used_as_it_is(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """As managed ones, whose users may not ask."""
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "u", "on", ">p", "~*", "+@all", "-config")
    assert await said(f"redis://u:p@127.0.0.1:{server.port}/0", caplog) == []


async def test_the_embedded_one_keeps_every_commit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert await said(f"embedded:{tmp_path / 'store'}", caplog) == []
