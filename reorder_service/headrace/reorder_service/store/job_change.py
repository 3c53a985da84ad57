"""Changes of a job's record that are carried out once, however often they are sent."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence

from headrace.errors import ConflictError, NotFoundError
from headrace.reorder_service.store.job_keys import NIL, job_key
from headrace.reorder_service.store.redis_database import Command, Database


async def change_job(database: Database, job: str, prepare: Callable[[], Awaitable[Sequence[Command]]]) -> None:
    """Carry out the commands that `prepare` returns once: a copy that the network held back does nothing later.

    Each change gives the record a new revision, and is carried out only on the revision that was read before it. `prepare` may
    read the store: it is called after that, and again where the record was changed meanwhile, also where it has raised
    ConflictError, since it may have read half of that change. Where it returns no command, nothing is changed.

    Raises NotFoundError where there is no such job, and whatever `prepare` raises.
    """
    key, revision, client = job_key(job, "job"), uuid.uuid4().hex, database.client
    while True:
        former = await database.read(client.hget(key, "revision"))
        if former == revision:
            return  # a copy whose answer was lost has done it
        try:
            commands = await prepare()
        except ConflictError:
            if await database.read(client.hget(key, "revision")) == former:
                raise
            continue
        if not commands:
            return
        unchanged: list[Command] = [("1", "EXISTS", key), (former or NIL, "HGET", key, "revision")]
        if await database.write(*commands, ("HSET", key, "revision", revision), when=unchanged):
            return
        if not await database.read(client.exists(key)):
            raise NotFoundError(f"the store has no job {job!r}")
