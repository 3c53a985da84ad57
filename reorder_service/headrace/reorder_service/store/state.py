"""The state store: everything that must survive the reorder service, and nothing else.

Every change is one transaction of the Redis server, refused where another process leads (store.database). The keys of a job,
all under `headrace:{job}:`:

    job          hash    spec, chosen (see JobRecord), uid, key (hex), state, message, paused, vocabulary (JSON), cursor (next
                         step), generation,
                         topology (JSON; empty: the spec's), mixture (JSON: [step, weight of each source], from that step on),
                         revision (a random id, replaced with every change that must not be repeated)
    shards       list    the manifest: JSON [sources, urls, names] of PAGE_SHARDS shards each; complete once there is a vocabulary
    indexed      string  rows of the shards, 8 hexadecimal digits each; NULs where they are not known
    window       hash    step -> results of probing its samples, for steps that are not committed
    corrections  hash    step -> JSON of the Correction (planning.cost_model.correction) with which the steps from that one on are
                         planned, up to the next entry; kept when the job goes back
    quarantine   hash    name -> JSON (reason, detail, sample_id, row, step, modality where it is known)
    thumbnails   list    NAME BASE64 of the latest refused samples of which something can be seen, the newest first
    ledger, pages        the records of the committed steps (headrace.reorder_service.store.step_ledger)
    nodes        string  JSON of the membership of a recoverable job's nodes (headrace.reorder_service.nodes.membership.Record)
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConflictError, JobFailedError, NotFoundError
from headrace.ledger import LedgerEntry
from headrace.manifest import MAX_SHARD_ROWS, PAGE_SHARDS, UNCOUNTED, ShardTable, Vocabulary
from headrace.message_codec import probe_value, ref_message, ref_value, rejection_message, rejection_value
from headrace.quarantine import Rejected
from headrace.reorder_service.store.fatal_jobs import FatalJobs
from headrace.reorder_service.store.finished_jobs import FINAL, NOTE_FIELDS, FinishedJobs
from headrace.reorder_service.store.job_change import change_job
from headrace.reorder_service.store.job_keys import JOBS, PARTS, hset, job_key
from headrace.reorder_service.store.progress import Progress, StepRecord, known_fields
from headrace.reorder_service.store.redis_database import Command, Database
from headrace.reorder_service.store.refused_samples import quarantine_entry, rejected_of, thumbnails_kept, thumbnails_of
from headrace.reorder_service.store.step_ledger import StepLedger
from headrace.sample import Probe, SampleRef
from headrace.ticket import make_key
from headrace.v1 import common_pb2
from headrace.v1.fleet_pb2 import StepProbed

_NAMES_PAGE = 1_000  # entries of the quarantine read or written at a time; a script's command has at most some 8,000 words
_DIGITS = 8  # hexadecimal digits for the rows of a shard
_KEPT_CORRECTIONS = 10_000  # steps that a job goes back and still finds the corrections that they were planned with
_COUNTS_PAGE = 16_384  # shards whose rows are read at a time

_STATES = ("INDEXING", "RUNNING", *FINAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job as the store knows it. `state` is a name of the JobState enum without its prefix."""

    job: str
    uid: str
    """Id that tells this job from any other that ever had its name."""
    key: bytes
    """Key that signs the job's tickets (headrace.ticket)."""
    spec_json: str
    chosen_json: str
    """What of the spec, as the steps are planned now, differs from the defaults of the release that wrote it; empty: unknown."""
    state: str
    message: str
    paused: bool
    cursor: int
    generation: int
    topology_json: str
    """Topology in place of the spec's; empty: the spec's."""
    execution_json: str
    """Execution in place of the spec's; empty: the spec's."""
    mixture: tuple[tuple[int, tuple[float, ...]], ...]
    """Changes of the mixture: (first step, weights of all sources) each."""
    progress: Progress
    vocabulary: Vocabulary | None
    """Vocabulary of the job; None until the shards are listed."""


class StateStore:
    """Reads and writes everything that must survive the reorder service; the module's docstring lists the keys.

    Every method raises UnavailableError where the server does not answer.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self.fatal_jobs = FatalJobs(database, self._failing)
        self.finished = FinishedJobs(database)
        self._steps = StepLedger(database)

    @classmethod
    async def open(cls, url: str) -> StateStore:
        """Connect to the store at `url`.

        Raises UserError where the URL is malformed or nothing answers there, ConflictError where the store is in use or of
        another release, UnavailableError where the server of an embedded store does not start or ends.
        """
        return cls(await Database.open(url))

    async def close(self) -> None:
        await self.database.close()

    async def create_job(self, job: str, spec_json: str, chosen_json: str = "") -> bool:
        """Create a job; return False where the store has one of that name already."""
        fields = {
            "spec": spec_json,
            "chosen": chosen_json,
            "uid": uuid.uuid4().hex[:8],
            "key": make_key().hex(),
            "state": "INDEXING",
            "message": "",
            "paused": "0",
            "cursor": "0",
            "generation": "1",
            "topology": "",
            "execution": "",
            "mixture": "[]",
        }
        key = job_key(job, "job")
        return await self.database.write(
            hset(key, fields),  # first what a full store refuses, and with it the whole
            ("UNLINK", *(job_key(job, part) for part in PARTS)),  # left of a former job of that name whose record is gone
            ("LREM", JOBS, 0, job),
            ("RPUSH", JOBS, job),
            when=[("0", "EXISTS", key)],
        )

    async def jobs(self) -> list[str]:
        """Return the names of all jobs, oldest first."""
        return list(await self._read(self._redis.lrange(JOBS, 0, -1)))

    async def load_job(self, job: str) -> JobRecord:
        """Return everything about a job but its manifest, ledger and quarantine. Raises NotFoundError where there is none."""
        fields = await self._read(self._redis.hgetall(job_key(job, "job")))
        if not fields:
            raise NotFoundError(f"the store has no job {job!r}")
        if fields["state"] not in _STATES:
            raise ConflictError(f"its state is {fields['state']!r}, which a newer release may know: run that one again")
        return JobRecord(
            job=job,
            uid=fields["uid"],
            key=bytes.fromhex(fields["key"]),
            spec_json=fields["spec"],
            chosen_json=fields.get("chosen", ""),  # former releases have written none
            state=fields["state"],
            message=fields["message"],
            paused=fields["paused"] == "1",
            cursor=int(fields["cursor"]),
            generation=int(fields["generation"]),
            topology_json=fields["topology"],
            execution_json=fields.get("execution", ""),  # stores of 0.1 have none
            mixture=tuple((step, tuple(weights)) for step, weights in json.loads(fields["mixture"])),
            progress=await self._steps.progress(job, int(fields["cursor"])),
            vocabulary=Vocabulary(**known_fields(Vocabulary, json.loads(fields["vocabulary"])))
            if "vocabulary" in fields
            else None,
        )

    async def load_manifest(self, job: str) -> tuple[ShardTable, NDArray[np.int64]]:
        """Return the shards, and the rows of each: UNCOUNTED where `save_index` has saved none.

        There are no shards where no manifest was saved.
        """
        columns: tuple[list[int], list[str], list[str]] = ([], [], [])
        for page in itertools.count():
            entry = await self._read(self._redis.lindex(job_key(job, "shards"), page))
            if entry is None:
                break
            for column, values in zip(columns, json.loads(entry)[: len(columns)], strict=True):
                column += values
        shards = ShardTable(*columns)
        num_rows = np.full(len(shards), UNCOUNTED, np.int64)
        for start in range(0, len(shards), _COUNTS_PAGE):
            first, last = _DIGITS * start, _DIGITS * (start + _COUNTS_PAGE) - 1
            digits = await self._read(self._redis.getrange(job_key(job, "indexed"), first, last))
            counts = np.frombuffer(bytes.fromhex(digits.replace("\0", "f")), ">i4")  # -1 is UNCOUNTED
            num_rows[start : start + len(counts)] = counts
        return shards, num_rows

    async def set_state(self, job: str, state: str, message: str = "") -> None:
        key, fields = job_key(job, "job"), {"state": state, "message": message}
        unneeded = [("UNLINK", job_key(job, "window"), job_key(job, "corrections"))] if state == "CANCELLED" else []
        await self._change(job, hset(key, fields), ("HDEL", key, *NOTE_FIELDS), *unneeded)

    async def _failing(self, job: str, message: str) -> list[Command]:
        """Return the commands that set a job to failed; none where it is over or gone."""
        key = job_key(job, "job")
        state = await self._read(self._redis.hget(key, "state"))
        return [] if state is None or state in FINAL else [hset(key, {"state": "FAILED", "message": message})]

    async def set_paused(self, job: str, paused: bool) -> None:
        await self._change(job, hset(job_key(job, "job"), {"paused": str(int(paused))}))

    async def set_topology(self, job: str, topology_json: str, execution_json: str, chosen_json: str, generation: int) -> bool:
        """Change topology and execution, and begin `generation`; return False where the present one is not the one before it."""
        key = job_key(job, "job")
        fields = {
            "topology": topology_json,
            "execution": execution_json,
            "chosen": chosen_json,
            "generation": str(generation),
        }
        return await self.database.write(hset(key, fields), when=[(str(generation - 1), "HGET", key, "generation")])

    async def save_membership(self, job: str, document: str) -> None:
        """Save the membership of a job's nodes, in place of any former one."""
        await self._change(job, ("SET", job_key(job, "nodes"), document))

    async def load_membership(self, job: str) -> str | None:
        """Return what `save_membership` has saved; None where it has saved nothing."""
        document: str | None = await self._read(self._redis.get(job_key(job, "nodes")))
        return document

    async def set_mixture(self, job: str, mixture: Sequence[tuple[int, Sequence[float]]]) -> None:
        await self._change(job, hset(job_key(job, "job"), {"mixture": json.dumps(mixture)}))

    async def list_anew(self, job: str) -> None:
        """Set a job that has committed nothing to INDEXING, without a manifest and without what was found in its shards."""
        key = job_key(job, "job")
        found = (job_key(job, part) for part in ("shards", "indexed", "window", "corrections", "quarantine"))
        fields = hset(key, {"state": "INDEXING", "message": ""})
        await self._change(job, fields, ("HDEL", key, "vocabulary", *NOTE_FIELDS), ("UNLINK", *found))

    async def save_manifest(self, job: str, shards: ShardTable, vocabulary: Vocabulary) -> None:
        """Save a manifest in place of any former one.

        Page by page, so that nobody else has to wait; it counts as saved only after the last write.
        """
        key = job_key(job, "shards")
        await self._change(job, ("HDEL", job_key(job, "job"), "vocabulary"), ("DEL", key), ("DEL", job_key(job, "indexed")))
        for page, start in enumerate(range(0, len(shards), PAGE_SHARDS)):
            entry = json.dumps(shards.columns(start, start + PAGE_SHARDS), ensure_ascii=False)
            await self.database.write(("RPUSH", key, entry), when=[(page, "LLEN", key)])  # once, however often it is sent
        await self._change(job, hset(job_key(job, "job"), {"vocabulary": json.dumps(asdict(vocabulary))}))

    async def save_index(self, job: str, shard: int, num_rows: int, rejected: Iterable[Rejected]) -> None:
        """Save the number of rows of a shard, after the damage that was found while counting them.

        Raises JobFailedError where the number is negative or more than MAX_SHARD_ROWS.
        """
        if not 0 <= num_rows <= MAX_SHARD_ROWS:
            raise JobFailedError(
                f"shard {shard} of job {job!r} has {num_rows} rows, not 0 to {MAX_SHARD_ROWS}: make smaller shards of it"
            )
        damage = iter({item.name: quarantine_entry(item, step=None) for item in rejected}.items())
        while batch := dict(itertools.islice(damage, _NAMES_PAGE)):
            await self.database.write(hset(job_key(job, "quarantine"), batch))
        await self.database.write(("SETRANGE", job_key(job, "indexed"), _DIGITS * shard, f"{num_rows:0{_DIGITS}x}"))

    async def save_probes(
        self,
        job: str,
        step: int,
        probes: Iterable[common_pb2.Probe],
        rejected: Iterable[Rejected],
        substitutes: Iterable[SampleRef],
    ) -> None:
        """Save the results of probing a step's samples: a new leader makes the same plan from them at once."""
        message = StepProbed(
            probes=probes,
            rejections=[rejection_message(item) for item in rejected],
            substitutes=[ref_message(ref) for ref in substitutes],
        )
        text = base64.b64encode(message.SerializeToString()).decode()
        await self.database.write(hset(job_key(job, "window"), {str(step): text}))

    async def load_probes(self, job: str, step: int) -> tuple[dict[int, Probe], list[Rejected], list[SampleRef]] | None:
        """Return what `save_probes` has saved of an uncommitted step: probes by place, refused samples, substitutes.

        None where it has saved nothing.
        """
        text = await self._read(self._redis.hget(job_key(job, "window"), str(step)))
        if text is None:
            return None
        return await asyncio.to_thread(_probed, text)

    async def save_correction(self, job: str, step: int, correction: str) -> None:
        """Save with which correction of the costs the steps from `step` on are planned."""
        await self.database.write(hset(job_key(job, "corrections"), {str(step): correction}))

    async def load_correction(self, job: str, step: int) -> str | None:
        """Return what `save_correction` has saved for `step`; None where it has saved nothing."""
        text: str | None = await self._read(self._redis.hget(job_key(job, "corrections"), str(step)))
        return text

    async def commit_step(
        self, job: str, step: int, record: StepRecord, rejected: Sequence[Rejected], *known: tuple[str, str | int]
    ) -> None:
        """Append `step` to the ledger and its rejections to the quarantine. Raises ConflictError unless it is the next step.

        `known`: (field, value) that the caller knows of the job's record, which must hold: a store that was put back has others.

        Repeating a commit whose answer was lost is harmless: the ledger has the same samples for the step. A sample that is
        refused in every epoch keeps the step of its first refusal.
        """
        append, when = await self._steps.commit(job, step, record)
        done = await self.database.write(
            *append,
            ("HDEL", job_key(job, "window"), step),
            ("HDEL", job_key(job, "corrections"), step - _KEPT_CORRECTIONS),
            *(("HSETNX", job_key(job, "quarantine"), item.name, quarantine_entry(item, step=step)) for item in rejected),
            *thumbnails_kept(job, rejected),
            when=[*when, *((str(value), "HGET", job_key(job, "job"), field) for field, value in known)],
        )
        if not done and await self._steps.committed_samples(job, step) != record.samples:
            raise ConflictError(f"step {step} of job {job!r} is not the next one to commit")

    async def compact_ledger(self, job: str, num_steps: int) -> bool:
        """Move the oldest `num_steps` steps that are in no page of the ledger into one; return False where fewer would stay."""
        had = False

        async def prepare() -> Sequence[Command]:
            nonlocal had
            commands = await self._steps.compact(job, num_steps)
            had = bool(commands)
            return commands

        await change_job(self.database, job, prepare)
        return had

    async def rewind(self, job: str, step: int) -> None:
        """Undo the commits of `step` and all later steps, set the job to RUNNING and begin a generation, in one transaction."""

        async def prepare() -> Sequence[Command]:
            entries = self._quarantined(job)
            names = [name async for name, fields in entries if fields["step"] is not None and fields["step"] >= step]
            return (  # first what a full store refuses, and with it the whole
                hset(job_key(job, "job"), {"cursor": str(step), "state": "RUNNING", "message": ""}),
                *await self._steps.rewind(job, step),
                *(["HDEL", job_key(job, "quarantine"), *names[n : n + _NAMES_PAGE]] for n in range(0, len(names), _NAMES_PAGE)),
                ("DEL", job_key(job, "window")),
                ("HDEL", job_key(job, "job"), *NOTE_FIELDS),
                ("HINCRBY", job_key(job, "job"), "generation", 1),
            )

        await change_job(self.database, job, prepare)

    def steps(self, job: str, start: int = 0) -> AsyncIterator[StepRecord]:
        """Yield the committed steps from `start` on, in order. Raises ConflictError where the ledger is damaged."""
        return self._steps.records(job, start)

    async def ledger(self, job: str, start: int = 0) -> AsyncIterator[LedgerEntry]:
        """Yield the committed steps from `start` on, in the public form of the ledger."""
        step = start
        async for record in self.steps(job, start):
            yield LedgerEntry(step=step, samples=record.samples, loss=record.loss)
            step += 1

    async def quarantine(self, job: str, page: int = _NAMES_PAGE) -> AsyncIterator[Rejected]:
        """Yield the quarantined samples, `page` at a time, in no order. One may come twice if the quarantine grows meanwhile."""
        async for name, fields in self._quarantined(job, page):
            yield rejected_of(name, fields)

    async def thumbnails(self, job: str) -> dict[str, bytes]:
        """Return the thumbnails that are kept of a job's refused samples, by name."""
        return thumbnails_of(await self._read(self._redis.lrange(job_key(job, "thumbnails"), 0, -1)))

    async def _quarantined(self, job: str, page: int = _NAMES_PAGE) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yield (name, fields) of each entry of the quarantine, in no order, read about `page` at a time."""
        cursor = 0
        while True:
            cursor, found = await self._read(self._redis.hscan(job_key(job, "quarantine"), cursor, count=page))
            for name, value in found.items():
                yield name, json.loads(value)
            if cursor == 0:
                return

    async def num_quarantined(self, job: str) -> int:
        return int(await self._read(self._redis.hlen(job_key(job, "quarantine"))))

    async def _change(self, job: str, *commands: Command) -> None:
        """Carry out commands on a job once, as `change_job` does. Raises NotFoundError where there is no such job."""

        async def prepare() -> Sequence[Command]:
            return commands

        await change_job(self.database, job, prepare)

    @property
    def _redis(self) -> Any:
        return self.database.client

    async def _read(self, command: Any) -> Any:
        return await self.database.read(command)


def _probed(text: str) -> tuple[dict[int, Probe], list[Rejected], list[SampleRef]]:
    message = StepProbed.FromString(base64.b64decode(text))
    probes = {item.sample_id: probe_value(item) for item in message.probes}
    return probes, [rejection_value(item) for item in message.rejections], [ref_value(ref) for ref in message.substitutes]
