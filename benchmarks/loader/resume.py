"""How long the ranks of a job take to go on after many steps, as another number of ranks than before.

A real rank trains the first steps; those behind it are written by the store's own code, with the samples of the first one, since
what is measured depends on how many there are and not on which.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.preprocess.inputs import EXAMPLE
from benchmarks.report import Row, Section, at_most
from benchmarks.timing import progress
from headrace import trainer
from headrace.jobs_client import JobsClient
from headrace.processes import Process, ProcessGroup
from headrace.reorder_service.store.ledger_pages import steps_per_page
from headrace.reorder_service.store.progress import Amounts, StepRecord
from headrace.reorder_service.store.redis_database import LEASE_S
from headrace.reorder_service.store.state import StateStore
from headrace.spec import JobSpec, parse_spec
from tests.redis_server import RedisServer

STEPS, REAL_STEPS, BACK_STEPS = 100_000, 4, 1_000
RANKS = 4
REPLICAS, GLOBAL_BATCH = 8, 64
GOAL_S = 1.0


def sections(folder: Path, *, quick: bool) -> Iterator[Section]:
    """Fill a store up to the last step, and have new ranks go on there, then from a checkpoint some steps before."""
    steps = STEPS // 20 if quick else STEPS
    (folder / "redis").mkdir(parents=True)
    server = RedisServer(folder / "redis")
    server.start(appendfsync="everysec")
    try:
        with _services(server, folder) as endpoint:
            with JobsClient(endpoint) as client:
                job = client.submit(_spec(steps + 10_000))
            progress("resume: one rank trains the first steps")
            with trainer.connect(endpoint, job=job) as loader:
                for step, _ in zip(loader, range(REAL_STEPS), strict=False):
                    list(step)
                    loader.commit(step)
                state = loader.state_dict()
        progress(f"resume: {steps:,} steps are written")
        asyncio.run(_fill(server.url, job, steps))
        with _services(server, folder) as endpoint:
            progress(f"resume: {RANKS} ranks go on")
            at_end = _resume(endpoint, job, state | {"step": steps, "content": 0})
            before = _resume(endpoint, job, state | {"step": steps - BACK_STEPS, "content": 0})
    finally:
        server.kill()
    rows = [
        Row(name=name, value=max(found), unit="s", goal=at_most(GOAL_S), detail=f"ranks: {', '.join(f'{s:.2f}' for s in found)}")
        for name, found in (
            (f"at step {steps:,}, the last that is committed", at_end),
            (f"from a checkpoint {BACK_STEPS:,} steps before it", before),
        )
    ]
    title = (
        f"from the call of `connect` to the first microbatch, slowest of {RANKS} ranks of a job that one rank began; "
        f"services are up, {GLOBAL_BATCH} texts a step, most steps written by the store's own code"
    )
    yield Section(title=title, rows=rows)


def _spec(steps: int) -> JobSpec:
    document = {
        "name": "resume",
        "sources": [{"path": str(EXAMPLE / "text-00000.tar")}],
        "global_batch": GLOBAL_BATCH,
        "steps": steps,
        "topology": {"replicas": REPLICAS, "microbatches": 2},
    }
    return parse_spec(document)


@contextmanager
def _services(server: RedisServer, folder: Path) -> Iterator[str]:
    """Yield the endpoint of a reorder service on the store, with a preprocessor."""
    with ProcessGroup() as group:
        log = f"{time.monotonic_ns()}.log"
        arguments = ["reorder", "--listen", "127.0.0.1:0", "--store", server.url]
        endpoint = group.add(Process("reorder service", arguments, folder / f"reorder-{log}")).endpoint()
        arguments = ["preprocessor", "--listen", "127.0.0.1:0", "--endpoint", endpoint, "--threads", "1"]
        group.add(Process("preprocessor", arguments, folder / f"preprocessor-{log}")).endpoint()
        yield endpoint


async def _fill(url: str, job: str, steps: int) -> None:
    """Commit the steps from the first that is not committed, in pages, as a service does beside a job."""
    store = await StateStore.open(url)
    await asyncio.sleep(LEASE_S)  # that of the service which has ended
    assert await store.database.lead("filling"), "no other process leads"
    entries = [entry async for entry in store.ledger(job)]
    names = entries[0].samples
    source = names[0].partition("/")[0]
    per_page = steps_per_page(GLOBAL_BATCH)
    for step in range(len(entries), steps):
        record = StepRecord(samples=names, loss=0.5, step_s=1.0, data_wait_s=0.1, delivered={source: Amounts(GLOBAL_BATCH, 1)})
        await store.commit_step(job, step, record, [])
        if (step + 1) % per_page == 0:
            await store.compact_ledger(job, per_page)
    await store.close()


def _resume(endpoint: str, job: str, state: dict[str, Any]) -> Sequence[float]:
    """Return the seconds of each rank, all of which begin together."""
    loaders = ThreadPoolExecutor(RANKS)
    try:
        return list(loaders.map(partial(_first_microbatch, endpoint, job, state), range(RANKS)))
    finally:
        loaders.shutdown()


def _first_microbatch(endpoint: str, job: str, state: dict[str, Any], rank: int) -> float:
    began_s = time.perf_counter()
    loader = trainer.connect(endpoint, job=job, rank=rank, num_ranks=RANKS)
    loader.load_state_dict(state)
    with loader:
        next(iter(next(iter(loader))))
        return time.perf_counter() - began_s
