"""`python -m benchmarks.scale.leader_change`: what 10,000 ranks and 2,000 preprocessors wait for when their leader is killed.

Two reorder services are on one store. The one that leads is killed while every rank knows a window of planned steps; the other
one takes over after the 1.5 s of the lease, the clients look for it with the pauses of real ones, and every rank is told its next
plan again. Ranks and preprocessors are light ones (benchmarks.scale.herd, benchmarks.scale.fleet), and share this machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.report import Report, Row, Section, at_most
from benchmarks.scale.light_clients import Client, job_spec
from benchmarks.scale.workload import WINDOW
from benchmarks.timing import percentile, progress
from headrace import rpc
from headrace.jobs_client import JobsClient
from headrace.processes import Process, ProcessGroup
from tests.redis_server import RedisServer

RANKS, PREPROCESSORS = 10_000, 2_000
GOAL_S = 5.0
_HERDS = 2
_START_S = 60.0
_SETTLE_S = 3.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.leader_change", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the clients")
    options = parser.parse_args()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    Report(benchmark="leader change", date=now, quick=options.quick, sections=[measure(quick=options.quick)]).show()


def measure(*, quick: bool) -> Section:
    """Kill a leader that has clients, and return what was measured."""
    ranks, preprocessors = (RANKS // 16 // _HERDS * _HERDS, PREPROCESSORS // 16) if quick else (RANKS, PREPROCESSORS)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name, ProcessGroup() as group:
        folder = Path(name)
        (folder / "redis").mkdir()
        server = RedisServer(folder / "redis")
        server.start(appendfsync="everysec")
        try:
            arguments = ["reorder", "--listen", "127.0.0.1:0", "--store", server.url]
            progress("one reorder service leads, another stands by")
            leader = group.add(Process("leader", arguments, folder / "leader.log"))
            rpc.await_reorder_service(leader.endpoint(), timeout_s=_START_S)
            standby = group.add(Process("standby", arguments, folder / "standby.log"))
            endpoints = f"{leader.endpoint()},{standby.endpoint()}"
            with JobsClient(leader.endpoint()) as client:
                job = client.submit(job_spec(ranks, steps=WINDOW + 1))
            progress(f"{preprocessors:,} preprocessors and {ranks:,} ranks connect")
            fleet = Client("benchmarks.scale.fleet", endpoints, preprocessors)
            each = ranks // _HERDS
            herds = [Client("benchmarks.scale.herd", endpoints, job, n * each, each, ranks, WINDOW) for n in range(_HERDS)]
            for herd in herds:
                herd.wait_open()
            time.sleep(_SETTLE_S)
            progress("the leader is killed")
            killed_s = time.monotonic()
            os.kill(leader.pid, signal.SIGKILL)
            with ThreadPoolExecutor(_HERDS) as pool:
                told = list(pool.map(Client.result, herds))
            fleet.result(end=True)
            lost = (folder / "standby.log").read_text().count("silent for")
        finally:
            server.kill()
    plans, places = ([at_s - killed_s for herd in told for at_s in herd[what]] for what in ("plans", "places"))
    rows = [
        Row(
            name="from the leader's death until a rank has its next plan, p99",
            value=percentile(plans, 99),
            unit="s",
            goal=at_most(GOAL_S),
            detail=_spread(plans),
        ),
        Row(
            name="and until it knows where all of its parts are, p99",
            value=percentile(places, 99),
            unit="s",
            detail=_spread(places),
        ),
        Row(name="preprocessors that were taken for dead", value=lost, goal=at_most(0)),
    ]
    return Section(title=f"a leader that is killed, with {ranks:,} ranks and {preprocessors:,} light preprocessors", rows=rows)


def _spread(waits_s: list[float]) -> str:
    return f"first {min(waits_s):.2f}, median {percentile(waits_s, 50):.2f}, longest {max(waits_s):.2f} s"


if __name__ == "__main__":
    main()
