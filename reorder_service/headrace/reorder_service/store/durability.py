"""Whether a Redis server keeps every commit: the settings with which it may forget some."""

from __future__ import annotations

import redis.asyncio as redis
from redis.exceptions import ResponseError

DURABLE = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
"""Redis settings with which a server keeps every commit."""


async def forgetful_settings(client: redis.Redis) -> dict[str, str] | None:
    """Return the server's settings that differ from those of DURABLE, and their values.

    None where the server does not tell its settings, as managed ones. Raises RedisError where it does not answer.
    """
    try:
        found = {name: (await client.config_get(name)).get(name, wanted) for name, wanted in DURABLE.items()}
    except ResponseError:
        return None
    return {name: str(value) for name, value in found.items() if value != DURABLE[name]}
