"""The state store: everything that must survive the reorder service, and nothing else.

One interface on redis-py. `redis://HOST:PORT/DB` is a server of the user's; `embedded:FOLDER` a private one
(reorder_service.embedded). Keys of a job, all under `headrace:{job}:`:

    job          hash    spec, uid, key (hex), state, message, vocabulary (JSON), cursor (next step), samples (committed so far)
    shards       list    the manifest: JSON (source, url, name), in manifest order
    indexed      hash    shard -> number of rows
    quarantine   hash    name -> JSON (reason, detail, sample_id, step)
    ledger       list    JSON (samples, loss, data_wait_s, step_s), one entry a committed step
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis.asyncio as redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import BusyLoadingError, RedisError

from headrace.errors import ConflictError, UnavailableError, UserError
from headrace.ledger import LedgerEntry
from headrace.manifest import ShardInfo, Vocabulary
from headrace.quarantine import Reason, Rejected
from headrace.ticket import make_key
from reorder_service.embedded import EmbeddedRedis

FORMAT = "2"  # of the keys below `headrace:`; raised with every change that an older release would misread
_TIMEOUT_S = 2.0  # with the retries below, a server that hangs is reported within the deadline of a call
_RETRIES = 3
_LOAD_TIMEOUT_S = 60.0  # a ledger of a million steps is read in less
_PAGE = 32  # entries read at a time; a step of a large job names thousands of samples

# KEYS: job, list of jobs. ARGV: spec, name, uid, key.
_CREATE = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], 'spec', ARGV[1], 'uid', ARGV[3], 'key', ARGV[4])
redis.call('HSET', KEYS[1], 'state', 'INDEXING', 'message', '', 'cursor', 0, 'samples', 0)
redis.call('RPUSH', KEYS[2], ARGV[2])
return 1
"""

# KEYS: job, ledger, quarantine. ARGV: expected cursor, ledger entry, number of samples, then name and value of each rejection.
# A commit happens whole or not at all, and only by the writer that knows the present cursor. A sample that is refused in
# every epoch keeps the step of its first refusal.
_COMMIT = """
if redis.call('HGET', KEYS[1], 'cursor') ~= ARGV[1] then return 0 end
redis.call('RPUSH', KEYS[2], ARGV[2])
redis.call('HINCRBY', KEYS[1], 'cursor', 1)
redis.call('HINCRBY', KEYS[1], 'samples', ARGV[3])
for i = 4, #ARGV, 2 do redis.call('HSETNX', KEYS[3], ARGV[i], ARGV[i + 1]) end
return 1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What a committed step leaves behind. `samples`: names, sorted; times in seconds, of the slowest rank."""

    samples: tuple[str, ...]
    loss: float
    step_s: float
    data_wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job as the store knows it. `state` is a name of the JobState enum without its prefix."""

    job: str
    uid: str
    """Tells this job from any other that ever had its name."""
    key: bytes
    """Signs its tickets (headrace.ticket)."""
    spec_json: str
    state: str
    message: str
    cursor: int
    samples: int
    vocabulary: Vocabulary | None
    shards: tuple[ShardInfo, ...]
    indexed: dict[int, int]


class StateStore:
    """See the module's text. Every method raises UnavailableError where the server does not answer."""

    def __init__(self, client: redis.Redis, embedded: EmbeddedRedis | None = None) -> None:
        self._redis = client
        self._embedded = embedded
        self._create = client.register_script(_CREATE)
        self._commit = client.register_script(_COMMIT)

    @classmethod
    async def open(cls, url: str) -> StateStore:
        """Connect to `url`. Raises UserError where it is malformed or nothing answers there."""
        embedded = None
        if url.startswith("embedded:"):
            embedded = EmbeddedRedis(Path(url.removeprefix("embedded:")))
            embedded.start()
            client = redis.Redis(unix_socket_path=str(embedded.socket), **_client_options())
        else:
            try:
                client = redis.Redis.from_url(url, **_client_options())
            except ValueError as err:
                raise UserError(f"store {url!r} is neither redis://HOST:PORT/DB nor embedded:FOLDER") from err
        store = cls(client, embedded)
        try:
            await _until_loaded(client)
            await _check_format(client, url)
        except ConflictError:
            await store.close()
            raise
        except RedisError as err:
            await store.close()
            raise UserError(f"no Redis server answers at {_without_password(url)}: {err}") from err
        return store

    def check(self) -> None:
        """Raises UnavailableError where the embedded server has ended."""
        if self._embedded is not None and not self._embedded.is_running():
            raise UnavailableError("the embedded store's server has ended; start the reorder service again: nothing is lost")

    async def close(self) -> None:
        await self._redis.aclose()
        if self._embedded is not None:
            self._embedded.stop()

    async def create_job(self, job: str, spec_json: str) -> bool:
        """False where the job is there already."""
        keys, args = [_key(job, "job"), "headrace:jobs"], [spec_json, job, uuid.uuid4().hex[:8], make_key().hex()]
        return bool(await self._do(self._create(keys=keys, args=args)))

    async def jobs(self) -> list[str]:
        """Names of all jobs, oldest first."""
        return list(await self._do(self._redis.lrange("headrace:jobs", 0, -1)))

    async def load_job(self, job: str) -> JobRecord:
        """Everything about a job but its ledger and quarantine. Raises KeyError where there is no such job."""
        fields = await self._do(self._redis.hgetall(_key(job, "job")))
        if not fields:
            raise KeyError(job)
        shards = await self._do(self._redis.lrange(_key(job, "shards"), 0, -1))
        indexed = await self._do(self._redis.hgetall(_key(job, "indexed")))
        return JobRecord(
            job=job,
            uid=fields["uid"],
            key=bytes.fromhex(fields["key"]),
            spec_json=fields["spec"],
            state=fields["state"],
            message=fields["message"],
            cursor=int(fields["cursor"]),
            samples=int(fields["samples"]),
            vocabulary=Vocabulary(**json.loads(fields["vocabulary"])) if "vocabulary" in fields else None,
            shards=tuple(ShardInfo(**json.loads(shard)) for shard in shards),
            indexed={int(shard): int(rows) for shard, rows in indexed.items()},
        )

    async def set_state(self, job: str, state: str, message: str = "") -> None:
        await self._do(self._redis.hset(_key(job, "job"), mapping={"state": state, "message": message}))

    async def save_manifest(self, job: str, shards: Sequence[ShardInfo], vocabulary: Vocabulary) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(_key(job, "shards"))
            for shard in shards:
                pipe.rpush(_key(job, "shards"), json.dumps(asdict(shard)))
            pipe.hset(_key(job, "job"), "vocabulary", json.dumps(asdict(vocabulary)))
            await self._execute(pipe)

    async def save_index(self, job: str, shard: int, num_rows: int, rejected: Iterable[Rejected]) -> None:
        """The rows of a shard, and the damage found while counting them."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(_key(job, "indexed"), str(shard), str(num_rows))
            for item in rejected:
                pipe.hset(_key(job, "quarantine"), item.name, _rejected_json(item, step=None))
            await self._execute(pipe)

    async def commit_step(self, job: str, step: int, record: StepRecord, rejected: Iterable[Rejected]) -> None:
        """Append `step` to the ledger and its rejections to the quarantine. Raises ConflictError unless it is the next one.

        Repeating a commit whose answer was lost is harmless: the ledger has the same samples for the step.
        """
        pairs = [word for item in rejected for word in (item.name, _rejected_json(item, step=step))]
        done = await self._do(
            self._commit(
                keys=[_key(job, "job"), _key(job, "ledger"), _key(job, "quarantine")],
                args=[str(step), json.dumps(asdict(record), ensure_ascii=False), str(len(record.samples)), *pairs],
            )
        )
        if not done and await self._committed_samples(job, step) != record.samples:
            raise ConflictError(f"step {step} of job {job!r} is not the next one to commit")

    async def _committed_samples(self, job: str, step: int) -> tuple[str, ...] | None:
        entry = await self._do(self._redis.lindex(_key(job, "ledger"), step))
        return tuple(json.loads(entry)["samples"]) if entry else None

    async def rewind(self, job: str, step: int) -> None:
        """Undo the commits of `step` and of all later steps; the job is RUNNING again, all in one transaction."""
        samples = int(await self._do(self._redis.hget(_key(job, "job"), "samples")))
        async for record in self.steps(job, step):
            samples -= len(record.samples)
        names = [name async for name, fields in self._quarantined(job) if fields["step"] is not None and fields["step"] >= step]
        async with self._redis.pipeline(transaction=True) as pipe:
            if step == 0:
                pipe.delete(_key(job, "ledger"))
            else:
                pipe.ltrim(_key(job, "ledger"), 0, step - 1)
            if names:
                pipe.hdel(_key(job, "quarantine"), *names)
            fields: dict[Any, Any] = {"cursor": str(step), "samples": str(samples), "state": "RUNNING", "message": ""}
            pipe.hset(_key(job, "job"), mapping=fields)
            await self._execute(pipe)

    async def steps(self, job: str, start: int = 0) -> AsyncIterator[StepRecord]:
        """Committed steps from `start` on, in order."""
        while True:
            page = await self._do(self._redis.lrange(_key(job, "ledger"), start, start + _PAGE - 1))
            for entry in page:
                fields = json.loads(entry)
                yield StepRecord(**{**fields, "samples": tuple(fields["samples"])})
            if len(page) < _PAGE:
                return
            start += _PAGE

    async def ledger(self, job: str) -> AsyncIterator[LedgerEntry]:
        """Committed steps as the ledger's public form."""
        step = 0
        async for record in self.steps(job):
            yield LedgerEntry(step=step, samples=record.samples, loss=record.loss)
            step += 1

    async def quarantine(self, job: str) -> list[Rejected]:
        """Quarantined samples, by name."""
        found = [
            Rejected(name=name, reason=Reason(fields["reason"]), detail=fields["detail"], sample_id=fields["sample_id"])
            async for name, fields in self._quarantined(job)
        ]
        return sorted(found, key=lambda item: item.name)

    async def _quarantined(self, job: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Each entry once, in no order."""
        cursor, seen = 0, set()
        while True:
            cursor, page = await self._do(self._redis.hscan(_key(job, "quarantine"), cursor, count=_PAGE))
            for name, value in page.items():
                if name not in seen:
                    seen.add(name)
                    yield name, json.loads(value)
            if cursor == 0:
                return

    async def num_quarantined(self, job: str) -> int:
        return int(await self._do(self._redis.hlen(_key(job, "quarantine"))))

    async def _do(self, command: Any) -> Any:
        try:
            return await command
        except RedisError as err:  # also: full, read-only, loading
            raise UnavailableError(f"the state store refuses or does not answer: {err}") from err

    async def _execute(self, pipe: Pipeline) -> None:
        await self._do(pipe.execute())


def _client_options() -> dict[str, Any]:
    """Commands are repeated where their answer is lost: every one of ours may be."""
    retry = Retry(ExponentialBackoff(cap=0.5, base=0.02), _RETRIES)
    return {
        "decode_responses": True,
        "socket_timeout": _TIMEOUT_S,
        "socket_connect_timeout": _TIMEOUT_S,
        "retry": retry,
    }


async def _until_loaded(client: redis.Redis) -> None:
    """Wait until the server answers; a restarted one reads its file first."""
    deadline = time.monotonic() + _LOAD_TIMEOUT_S
    while True:
        try:
            await client.ping()
            return
        except BusyLoadingError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.1)


async def _check_format(client: redis.Redis, url: str) -> None:
    if not await client.exists("headrace:jobs"):
        await client.set("headrace:format", FORMAT)
    found = await client.get("headrace:format")
    if found != FORMAT:
        raise ConflictError(
            f"the store {_without_password(url)} was written by another release (format {found!r}, not {FORMAT}); "
            "name another one, or finish its jobs with that release"
        )


def _key(job: str, what: str) -> str:
    return f"headrace:{{{job}}}:{what}"


def _rejected_json(item: Rejected, *, step: int | None) -> str:
    fields = {"reason": str(item.reason), "detail": item.detail, "sample_id": item.sample_id, "step": step}
    return json.dumps(fields, ensure_ascii=False)


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return url.replace(f":{parts.password}@", ":***@") if parts.password else url
