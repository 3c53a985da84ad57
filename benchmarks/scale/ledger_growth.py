"""`python -m benchmarks.scale.ledger_growth`: how many bytes of the store a committed sample takes, after a long job.

The store's own code commits the steps and compacts the ledger, as a reorder service does beside a job that runs. The samples
come in an order like that of a job: their shards are shuffled eight at a time. What is read at the end, and after the job went
back into the middle of a page, is compared with what was committed.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import redis

from benchmarks.report import RESULTS, Report, Row, Section, at_most
from benchmarks.timing import progress
from headrace.ledger import ledger_sha256
from headrace.reorder_service.store.job_keys import job_key
from headrace.reorder_service.store.ledger_pages import PAGE_STEPS, steps_per_page
from headrace.reorder_service.store.progress import Amounts, StepRecord
from headrace.reorder_service.store.state import StateStore
from tests.redis_server import RedisServer

SAMPLES = 100_000_000
HASHED_SAMPLES = 10_000_000
BATCH = 4_096
GOAL_BYTES = 2.0
_SHARD_ROWS, _SHUFFLED = 10_000, 8
_ROUND = 2 * PAGE_STEPS  # steps are a multiple of it, so that at half of them and at the end as many are in no page
_SEED = 7

Name = Callable[[int, int], str]
"""Function that returns the name of a sample by its shard and row."""


def counted(shard: int, row: int) -> str:
    """Return a name as most data sets have it: the samples of a shard are numbered."""
    return f"web/train-{shard:06}.tar/{shard * _SHARD_ROWS + row:09}"


def hashed(shard: int, row: int) -> str:
    """Return a name that nothing makes shorter: its key is random, as an MD5 or a UUID is."""
    return f"web/train-{shard:06}.tar/{hashlib.md5(f'{shard} {row}'.encode(), usedforsecurity=False).hexdigest()}"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.ledger_growth", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="an eighth of the samples")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where ledger.json goes")
    options = parser.parse_args()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    report = Report(benchmark="ledger", date=now, quick=options.quick, sections=[_measure(quick=options.quick)])
    report.write(options.results / "ledger.json")
    report.show()


def _measure(*, quick: bool) -> Section:
    """Commit the steps of two jobs, and return what they take."""
    part = 8 if quick else 1
    rows = [
        _row("numbered keys", counted, SAMPLES // part, GOAL_BYTES),
        _row("random keys of 32 digits", hashed, HASHED_SAMPLES // part, None),
    ]
    return Section(title=f"bytes of the store for each committed sample, {BATCH:,} samples a step", rows=rows)


def _row(what: str, name: Name, samples: int, goal: float | None) -> Row:
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        (Path(folder) / "redis").mkdir()
        server = RedisServer(Path(folder) / "redis")
        server.start(appendfsync="no")
        try:
            steps = samples // BATCH // _ROUND * _ROUND
            grown, used, plain, cpu_s = asyncio.run(_commit(server, name, steps))
        finally:
            server.kill()
    return Row(
        name=f"{steps * BATCH:,} samples with {what}",
        value=grown / (steps // 2 * BATCH),
        unit="B",
        goal=at_most(goal) if goal else None,
        detail=f"{used / 1e6:,.0f} MB in all; {plain / BATCH:.0f} B without pages; {1e3 * cpu_s / steps:.1f} ms of CPU a step",
    )


async def _commit(server: RedisServer, name: Name, steps: int) -> tuple[int, int, int, float]:
    """Commit the steps, and check the ledger.

    Return by how many bytes the second half of the steps makes it grow, its bytes in all, the bytes of a step that is in no page,
    and the CPU seconds of commits and pages.
    """
    store, digest, cpu_s, plain, half = await StateStore.open(server.url), hashlib.sha256(), 0.0, 0, 0
    await store.create_job("job", "{}")
    before = _used_bytes(server)
    for step, names in zip(range(steps), _batches(name), strict=False):
        record = StepRecord(samples=names, loss=0.5, step_s=1.0, data_wait_s=0.1, delivered={"web": Amounts(BATCH, 700 * BATCH)})
        digest.update(repr((step, names)).encode())
        began_s = time.process_time()
        await store.commit_step("job", step, record, [])
        if (step + 1) % steps_per_page(BATCH) == 0:
            await store.compact_ledger("job", steps_per_page(BATCH))
        cpu_s += time.process_time() - began_s
        if step == 0:
            plain = len(await store.database.client.lindex(job_key("job", "ledger"), 0) or "")
        if step + 1 == steps // 2:
            half = _used_bytes(server)
        if step % 1_000 == 0:
            progress(f"{step:,} of {steps:,} steps")
    used, grown = _used_bytes(server) - before, _used_bytes(server) - half
    read, middle, first = hashlib.sha256(), steps // 2 + 5, ""
    async for entry in store.ledger("job"):
        read.update(repr((entry.step, entry.samples)).encode())
    assert read.hexdigest() == digest.hexdigest(), "the ledger is not what was committed"
    first = ledger_sha256([entry async for entry in store.ledger("job", middle - 2)][:2])
    await store.rewind("job", middle)
    assert ledger_sha256([entry async for entry in store.ledger("job", middle - 2)]) == first, "going back changed what is kept"
    await store.close()
    return grown, used, plain, cpu_s


def _batches(name: Name) -> Iterator[tuple[str, ...]]:
    """Yield the sorted names of one step after the other."""
    rng, names = np.random.default_rng(_SEED), list[str]()
    for first in range(0, 1 << 40, _SHUFFLED):
        places = rng.permutation(_SHUFFLED * _SHARD_ROWS).tolist()
        names += (name(first + place // _SHARD_ROWS, place % _SHARD_ROWS) for place in places)
        whole = len(names) // BATCH * BATCH
        yield from (tuple(sorted(names[start : start + BATCH])) for start in range(0, whole, BATCH))
        names = names[whole:]


def _used_bytes(server: RedisServer) -> int:
    with redis.Redis(port=server.port) as client:
        return int(client.info("memory")["used_memory_dataset"])


if __name__ == "__main__":
    main()
