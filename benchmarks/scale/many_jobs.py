"""`python -m benchmarks.scale.many_jobs`: a leader change, and `headrace job list`, over a store with 100,000 finished jobs.

The store is a Redis server with an append-only file. Its finished jobs are copies of one that the real store has written; 50 more
are running, and have a manifest each. Two reorder services are on it: the one that leads is killed, and what the other one takes
until it serves is measured from that moment on, so that it includes the 1.5 s of the lease.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import redis

from benchmarks.report import Report, Row, Section, at_most
from benchmarks.timing import progress
from headrace import rpc
from headrace.manifest import ShardInfo, ShardTable, Vocabulary
from headrace.processes import Process, ProcessGroup
from headrace.reorder_service.store.finished_jobs import Summary
from headrace.reorder_service.store.job_keys import JOBS, job_key
from headrace.reorder_service.store.progress import Amounts, StepRecord
from headrace.reorder_service.store.state import StateStore
from headrace.spec import parse_spec
from tests.redis_server import RedisServer

FINISHED = 100_000
RUNNING = 50
GOAL_S = 5.0
GOAL_MIB = 512.0  # of which 300 are those of a service without a job, with its compiled planner
LIST_GOAL_S = 5.0
_SHARDS, _ROWS, _STEPS, _BATCH = 100, 10_000, 100, 64
_AT_A_TIME = 1_000
_POLL_S, _PATIENCE_S = 0.02, 120.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.many_jobs", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a hundredth of the jobs")
    options = parser.parse_args()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    Report(benchmark="many jobs", date=now, quick=options.quick, sections=[measure(quick=options.quick)]).show()


def measure(*, quick: bool) -> Section:
    """Fill a store, kill its leader, and return what was measured."""
    finished = FINISHED // 100 if quick else FINISHED
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name, ProcessGroup() as group:
        folder = Path(name)
        (folder / "redis").mkdir()
        server = RedisServer(folder / "redis")
        server.start(appendfsync="everysec")
        try:
            progress(f"{finished:,} finished jobs and {RUNNING} running ones are written")
            asyncio.run(_write_jobs(server.url))
            _copy_finished(server, finished)
            arguments = ["reorder", "--listen", "127.0.0.1:0", "--store", server.url, "--keep-finished", "ever"]
            progress("one reorder service leads, another stands by")
            leader = group.add(Process("leader", arguments, folder / "leader.log"))
            rpc.await_reorder_service(leader.endpoint(), timeout_s=60.0)
            standby = group.add(Process("standby", arguments, folder / "standby.log"))
            endpoint = standby.endpoint()
            base_mib = _memory_mib(standby.pid)
            progress("the leader is killed")
            killed_s = time.monotonic()
            os.kill(leader.pid, signal.SIGKILL)
            while not rpc.is_serving(endpoint, rpc.JOBS):
                if time.monotonic() > killed_s + _PATIENCE_S:
                    raise RuntimeError(f"nobody serves {_PATIENCE_S:g} s after the leader was killed")
                time.sleep(_POLL_S)
            took_s = time.monotonic() - killed_s
            lead_mib = _memory_mib(standby.pid)
            listed_s, listed = _listed(endpoint)
            all_s, every = _listed(endpoint, "--all", "--format", "json")
            peak_mib, log = _memory_mib(standby.pid, "VmHWM"), (folder / "standby.log").read_text()
        finally:
            server.kill()
    assert every == finished + RUNNING, f"{every} jobs were listed"
    lost = log.count("lease not renewed") + log.count("replaced")
    rows = [
        Row(name="from the leader's death until the next one serves", value=took_s, unit="s", goal=at_most(GOAL_S)),
        Row(
            name="memory of the new leader, all jobs listed",
            value=peak_mib,
            unit="MiB",
            goal=at_most(GOAL_MIB),
            detail=f"{base_mib:.0f} before it led, {lead_mib:.0f} when it served",
        ),
        Row(name="`headrace job list`", value=listed_s, unit="s", goal=at_most(LIST_GOAL_S), detail=f"{listed} jobs"),
        Row(name="`headrace job list --all --format json`", value=all_s, unit="s", detail=f"{every:,} jobs"),
        Row(name="leases lost", value=lost, goal=at_most(0)),
    ]
    return Section(title=f"a store with {finished:,} finished jobs and {RUNNING} running ones", rows=rows)


async def _write_jobs(url: str) -> None:
    """Write one finished job, which the others are copies of, and those that run."""
    store = await StateStore.open(url)
    table = ShardTable.of(ShardInfo(source=0, url=f"s3://data/{n:05}.tar", name=f"data/{n:05}.tar") for n in range(_SHARDS))
    for job in ("finished-0", *(f"running-{n}" for n in range(RUNNING))):
        spec = {"name": job, "sources": [{"path": "s3://data", "name": "data"}], "global_batch": _BATCH, "steps": _STEPS}
        await store.create_job(job, parse_spec(spec).to_json())
        await store.save_manifest(job, table, Vocabulary(size=50_000, image_token=1, audio_token=2))
        for shard in range(_SHARDS):
            await store.save_index(job, shard, _ROWS, [])
        steps = _STEPS if job == "finished-0" else _STEPS // 2
        for step in range(steps):
            names = tuple(f"data/{step:05}.tar/{n:09}" for n in range(_BATCH))
            record = StepRecord(
                samples=names, loss=1.0, step_s=1.0, data_wait_s=0.1, delivered={"data": Amounts(_BATCH, 9 * _BATCH)}
            )
            await store.commit_step(job, step, record, [])
        await store.set_state(job, "DONE" if job == "finished-0" else "RUNNING")
    figures = Summary(
        committed_steps=_STEPS, num_steps=_STEPS, samples=_STEPS * _BATCH, num_shards=_SHARDS, indexed_shards=_SHARDS
    )
    await store.finished.note("finished-0", time.time(), figures)
    await store.close()


def _copy_finished(server: RedisServer, finished: int) -> None:
    """Copy the record of the finished job: a leader reads nothing else of it, and its ledger would take gigabytes here."""
    with redis.Redis(port=server.port) as client:
        record: Any = client.hgetall(job_key("finished-0", "job"))
        names = [f"finished-{n}" for n in range(1, finished)]
        for start in range(0, len(names), _AT_A_TIME):
            pipeline = client.pipeline(transaction=False)
            for name in names[start : start + _AT_A_TIME]:
                pipeline.hset(
                    job_key(name, "job"), mapping={**record, b"spec": record[b"spec"].replace(b"finished-0", name.encode())}
                )
            pipeline.rpush(JOBS, *names[start : start + _AT_A_TIME])
            pipeline.execute()


def _listed(endpoint: str, *options: str) -> tuple[float, int]:
    """Return the seconds that `headrace job list` took, and how many jobs it has named."""
    command: Sequence[str] = [sys.executable, "-m", "headrace.cli", "job", "list", "--endpoint", endpoint, *options]
    began_s = time.monotonic()
    printed = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    return time.monotonic() - began_s, len(re.findall(r"(?:finished|running)-\d+", printed))


def _memory_mib(pid: int, what: str = "VmRSS") -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(status.partition(f"{what}:")[2].split()[0]) / 1024


if __name__ == "__main__":
    main()
