"""A job's ledger in the store: the records of its committed steps, of which all but the latest lie in compressed pages.

job      hash        of it: cursor (next step), paged (how many steps are in pages; absent: none), border (JSON: digest of the
                     last page, and sums over the steps in pages)
pages    sorted set  texts of headrace.reorder_service.store.ledger_pages, each with its first step as its score
ledger   list        JSON (samples, substitutes, loss, data_wait_s, step_s, delivered, sums), one entry for each committed step
                     from step `paged` on; the sums are over all steps so far
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, fields
from typing import Any

from headrace.errors import ConflictError
from headrace.reorder_service.store.job_keys import NIL, hset, job_key
from headrace.reorder_service.store.ledger_pages import LedgerPage
from headrace.reorder_service.store.progress import Progress, StepRecord
from headrace.reorder_service.store.redis_database import RAISE_FORMAT, Command, Database

_MOST_ENTRIES, _MOST_BYTES = 32, 4 << 20  # of a reply; one entry, however large, is in each

# Reads entries that lie in the list, at one moment. KEYS: job, ledger. ARGV: first step, most entries, most bytes (of which the
# last entry may be beyond). Replies with the generation, the uid, how many steps are in pages, and the entries.
_READ = """
local paged = tonumber(redis.call('HGET', KEYS[1], 'paged') or 0)
local reply = {redis.call('HGET', KEYS[1], 'generation'), redis.call('HGET', KEYS[1], 'uid'), paged}
local place, size = ARGV[1] - paged, 0
while place >= 0 and #reply < 3 + ARGV[2] and size < tonumber(ARGV[3]) do
  local entry = redis.call('LINDEX', KEYS[2], place)
  if not entry then break end
  reply[#reply + 1], place, size = entry, place + 1, size + #entry
end
return reply
"""


class StepLedger:
    """Reads a job's ledger, and says with which commands it changes."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._script = database.client.register_script(_READ)

    async def progress(self, job: str, step: int) -> Progress:
        """Return the sums over all steps before `step`, as far as they are committed."""
        return (await self._before(job, step))[0]

    async def committed_samples(self, job: str, step: int) -> tuple[str, ...] | None:
        """Return the names that a step consumed; None where it is not committed."""
        return await anext((record.samples async for record in self.records(job, step)), None)

    async def records(self, job: str, start: int = 0) -> AsyncIterator[StepRecord]:
        """Yield the committed steps from `start` on, in order.

        Raises ConflictError where a page is damaged, or does not follow the one before.
        """
        step, former = start, None
        while True:
            _, _, paged, *entries = await self._read(job, step)
            if step < paged:
                page = await self._page(job, step)
                if former is not None and (page.first, page.former) != (former.stop, former.digest):
                    raise _broken(job, step)
                for record in page.records[step - page.first :]:
                    yield record
                step, former = page.stop, page
            elif entries:
                for entry in entries:
                    yield _record(entry)
                step += len(entries)
            else:
                return

    async def commit(self, job: str, step: int, record: StepRecord) -> tuple[list[Command], list[Command]]:
        """Return the commands that append `step` to the ledger, and the conditions under which they may: it is the next step.

        A copy of them that arrives after the job went back, or after it was deleted and made again, does not meet them.
        """
        before, generation, uid = await self._before(job, step)
        of_record = {field.name: getattr(record, field.name) for field in fields(record)}  # asdict would copy all names
        entry = {**of_record, "sums": asdict(before.after(record))}
        key = job_key(job, "job")
        append: list[Command] = [
            ("RPUSH", job_key(job, "ledger"), json.dumps(entry, ensure_ascii=False)),
            ("HINCRBY", key, "cursor", 1),
        ]
        return append, [(step, "HGET", key, "cursor"), (generation, "HGET", key, "generation"), (uid, "HGET", key, "uid")]

    async def rewind(self, job: str, step: int) -> list[Command]:
        """Return the commands that drop `step` and all later steps. They hold until anything of the job is changed otherwise."""
        ledger, pages = job_key(job, "ledger"), job_key(job, "pages")
        paged = int(await self._database.read(self._database.client.hget(job_key(job, "job"), "paged")) or 0)
        if step >= paged:
            return [("LTRIM", ledger, 0, step - paged - 1) if step > paged else ("DEL", ledger)]
        page = await self._page(job, step)
        commands: list[Command] = [("DEL", ledger), ("ZREMRANGEBYSCORE", pages, page.first, "+inf")]
        digest = page.former
        if step > page.first:
            kept, text = await asyncio.to_thread(
                LedgerPage.of, page.first, page.records[: step - page.first], page.before, page.former
            )
            digest = kept.digest
            commands.append(("ZADD", pages, page.first, text))
        return [*commands, _set_border(job, step, digest, page.progress(step))]

    async def compact(self, job: str, num_steps: int) -> list[Command]:
        """Return the commands that move the first `num_steps` steps of the list into a page; none where as many would not stay.

        They hold as those of `rewind` do.
        """
        client, ledger = self._database.client, job_key(job, "ledger")
        if await self._database.read(client.llen(ledger)) < 2 * num_steps:
            return []
        fields = await self._database.read(client.hmget(job_key(job, "job"), "paged", "border"))
        first, border = int(fields[0] or 0), json.loads(fields[1] or "{}")
        entries: list[str] = []
        while len(entries) < num_steps:
            _, _, paged, *more = await self._read(job, first + len(entries))
            if paged != first or not more:
                raise _broken(job, first + len(entries))
            entries += more
        before = Progress.of_document(border["sums"]) if border else Progress()
        page, text, after = await asyncio.to_thread(_paged, first, entries[:num_steps], before, border.get("digest", ""))
        return [
            ("ZADD", job_key(job, "pages"), first, text),
            ("LTRIM", ledger, num_steps, -1),
            _set_border(job, page.stop, page.digest, after),
            RAISE_FORMAT,
        ]

    async def _before(self, job: str, step: int) -> tuple[Progress, str, str]:
        """Return the sums over all steps before `step`, and the job's generation and uid, as a condition names them."""
        generation, uid, paged, *entries = await self._read(job, step - 1, 1)
        progress = Progress()
        if entries:
            progress = Progress.of_document(json.loads(entries[0])["sums"])
        elif 0 < step <= paged:
            progress = (await self._page(job, step - 1)).progress(step)
        return progress, generation or NIL, uid or NIL

    async def _page(self, job: str, step: int) -> LedgerPage:
        """Return the page with a step. Raises ConflictError where there is none."""
        search = self._database.client.zrevrangebyscore(job_key(job, "pages"), step, "-inf", 0, 1)
        texts = await self._database.read(search)
        page = await asyncio.to_thread(LedgerPage.read, texts[0]) if texts else None
        if page is None or not page.first <= step < page.stop:
            raise _broken(job, step)
        return page

    async def _read(self, job: str, first: int, most: int | None = None) -> Any:
        keys = [job_key(job, "job"), job_key(job, "ledger")]
        return await self._database.read(self._script(keys=keys, args=[first, most or _MOST_ENTRIES, _MOST_BYTES]))


def _broken(job: str, step: int) -> ConflictError:
    return ConflictError(
        f"step {step} is not where the ledger of job {job!r} has it: read it again, since the job may have gone back meanwhile; "
        "if that changes nothing, restore the store from a copy"
    )


def _set_border(job: str, paged: int, digest: str, sums: Progress) -> Command:
    border = json.dumps({"digest": digest, "sums": asdict(sums)}, ensure_ascii=False)
    return hset(job_key(job, "job"), {"paged": str(paged), "border": border})


def _paged(first: int, entries: Sequence[str], before: Progress, former: str) -> tuple[LedgerPage, str, Progress]:
    """Return the page of these entries of the list, its text, and the sums after it; the text was read again before."""
    records = [_record(entry) for entry in entries]
    page, text = LedgerPage.of(first, records, before, former)
    found = LedgerPage.read(text)
    assert [record.samples for record in found.records] == [record.samples for record in records], "a page lost names"
    return page, text, Progress.of_document(json.loads(entries[-1])["sums"])


def _record(entry: str) -> StepRecord:
    fields = json.loads(entry)
    del fields["sums"]
    return StepRecord.of_document(fields)
