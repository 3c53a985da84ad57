"""Jobs that are over, as the store keeps them: what is told of them without loading them, and how they are deleted.

The record of a job that is over gets two more fields, soon after its end: `ended_s`, the time of the note in seconds since 1970,
and `summary`, a JSON object of figures (Summary). Both are dropped when the job goes on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headrace.errors import ConflictError, NotFoundError
from headrace.reorder_service.store.job_change import change_job
from headrace.reorder_service.store.job_keys import JOBS, NIL, PARTS, hset, job_key
from headrace.reorder_service.store.redis_database import Command, Database

FINAL = ("DONE", "FAILED", "CANCELLED")  # states of a job that is over
NOTE_FIELDS = ("ended_s", "summary")
_AT_A_TIME = 500  # jobs read by one script: as many keep the server, and whoever reads the reply, for some milliseconds
_LOOKED_AT = 5_000  # jobs whose states one script looks at, which takes the server as long

# Reads fields of several records at one moment. ARGV: fields, as JSON; keys of the records, as JSON. Replies in JSON: for each
# record the values of the fields, false where there is none.
_READ = """
local fields, replies = cjson.decode(ARGV[1]), {}
for place, key in ipairs(cjson.decode(ARGV[2])) do replies[place] = redis.call('HMGET', key, unpack(fields)) end
return cjson.encode(replies)
"""

# Looks for jobs that are not over. ARGV: from which place in the list of jobs to which to look, and the states of jobs that
# are over. Replies with the number of jobs there, and the names of those that are not over. KEYS: the list of jobs.
_UNFINISHED = """
local over = {}
for place = 3, #ARGV do over[ARGV[place]] = true end
local names = redis.call('LRANGE', KEYS[1], ARGV[1], ARGV[2])
local reply = {#names}
for _, name in ipairs(names) do
  if not over[redis.call('HGET', 'headrace:{' .. name .. '}:job', 'state')] then reply[#reply + 1] = name end
end
return reply
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of a job at its end; 0 where they are not known."""

    committed_steps: int
    num_steps: int = 0
    samples: int = 0
    quarantined: int = 0
    num_shards: int = 0
    indexed_shards: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNote:
    """What the store tells of a job without loading it."""

    job: str
    state: str
    """Name of the JobState enum without its prefix; empty where the job has no record."""
    message: str
    committed_steps: int
    ended_s: float | None
    """When it was noted that the job is over, in seconds since 1970; None where that was not noted."""
    summary: Summary | None
    """Figures at the job's end; None where they were not noted."""

    @property
    def is_over(self) -> bool:
        return self.state in FINAL


class FinishedJobs:
    """Reads what the store tells of jobs, notes their end and deletes them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._script = database.client.register_script(_READ)
        self._unfinished = database.client.register_script(_UNFINISHED)

    async def others(self) -> list[str]:
        """Return the names of all jobs that are not over, or have no record, oldest first. Reads nothing else of any job."""
        names, start = list[str](), 0
        while True:
            args: list[str | int] = [start, start + _LOOKED_AT - 1, *FINAL]
            count, *found = await self._database.read(self._unfinished(keys=[JOBS], args=args))
            names += found
            if count < _LOOKED_AT:
                return names
            start += count

    async def read(self, jobs: Sequence[str]) -> list[JobNote]:
        """Return what the store tells of these jobs, in their order."""
        notes: list[JobNote] = []
        for start in range(0, len(jobs), _AT_A_TIME):
            names = jobs[start : start + _AT_A_TIME]
            fields = json.dumps(["state", "message", "cursor", *NOTE_FIELDS])
            keys = json.dumps([job_key(name, "job") for name in names], ensure_ascii=False)
            replies = await self._database.read(self._script(args=[fields, keys]))
            notes += map(_note, names, json.loads(replies))
        return notes

    async def note(self, job: str, now_s: float, summary: Summary) -> None:
        """Note that a job is over, once; not where it goes on by now. Raises NotFoundError where there is none."""

        async def prepare() -> Sequence[Command]:
            (found,) = await self.read([job])
            fields = {"ended_s": f"{now_s:.0f}", "summary": json.dumps(asdict(summary))}
            return [hset(job_key(job, "job"), fields)] if found.is_over and found.summary is None else []

        await change_job(self._database, job, prepare)

    async def delete(self, job: str, *, even_unfinished: bool = False) -> None:
        """Delete a job with all that the store has of it, so that its name is free.

        Raises NotFoundError where there is none, and ConflictError where it is not over and not `even_unfinished`.
        """
        client, key = self._database.client, job_key(job, "job")
        while True:
            exists, (state, *identity) = (
                await self._database.read(client.exists(key)),
                await self._database.read(client.hmget(key, "state", "revision", "uid")),
            )
            if not exists and await self._database.read(client.lpos(JOBS, job)) is None:
                raise NotFoundError(f"the store has no job {job!r}: `headrace job list --all` names those that it has")
            if state not in FINAL and not even_unfinished:
                raise ConflictError(unfinished(job, state))
            unchanged: list[Command] = [
                (exists, "EXISTS", key),
                *((value or NIL, "HGET", key, field) for field, value in zip(("revision", "uid"), identity, strict=True)),
            ]
            keys = [key, *(job_key(job, part) for part in PARTS)]
            if await self._database.write(("UNLINK", *keys), ("LREM", JOBS, 1, job), when=unchanged):
                return
            if not await self._database.read(client.exists(key)):
                return  # a copy whose answer was lost has done it


def unfinished(job: str, state: str) -> str:
    """Return the sentence that refuses to delete a job in this state."""
    return f"job {job!r} is {state} and not over: end it with `headrace job cancel {job}` first, and delete it then"


def _note(job: str, values: Sequence[Any]) -> JobNote:
    """Return the note with these values of `state`, `message`, `cursor` and NOTE_FIELDS, each false where there is none.

    A note of an end after which the job went on, under a release that does not drop it, counts as none.
    """
    state, message, cursor, ended_s, summary = (value or "" for value in values)
    steps = int(cursor) if cursor.isdigit() else 0
    figures = _summary(json.loads(summary)) if summary else None
    if figures is not None and figures.committed_steps != steps:
        figures, ended_s = None, ""
    return JobNote(
        job=job,
        state=state,
        message=message,
        committed_steps=steps,
        ended_s=float(ended_s) if ended_s else None,
        summary=figures,
    )


def _summary(fields: Mapping[str, int]) -> Summary:
    return Summary(**fields)
