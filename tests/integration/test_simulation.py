"""A slice of `make simulate`, and what it rests on: a seed is a run, a run is like a real one, and faults are found."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from headrace.preprocessor import engine, known_jobs
from headrace.trainer.loading.loader_state import LoaderState
from headrace.trainer.loading.session import SessionClient
from tests.simulation.data_set import SimulatedJobWork, job_spec, list_shards
from tests.simulation.simulated_preprocessor import run_preprocessor
from tests.wire import free_ports

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

RANKS, STEPS = 2, 20


def simulate(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_runs_keep_every_promise_and_a_seed_gives_the_same_run_whatever_ran_before() -> None:
    many = [json.loads(line) for line in simulate("--stride", 1, "--first", 0, "--runs", 4).stdout.splitlines()]
    assert len(many) == 4
    assert [run for run in many if run["violations"]] == []
    assert {run["relayed"] > 0 for run in many} == {False, True}
    again = [json.loads(line) for line in simulate("--stride", 1, "--first", 2, "--runs", 1).stdout.splitlines()]
    assert again == many[2:3]


@pytest.mark.slow
def test_nothing_of_a_run_is_left_once_the_next_begins() -> None:
    code = """
from tests.simulation import determinism
determinism.install()
import gc
from tests.simulation import campaign
from tests.simulation.virtual_loop import VirtualLoop
for seed in range(3):
    campaign.run_seed(seed)
determinism.forget_former_runs()
gc.unfreeze()
print(sum(type(one) is VirtualLoop for one in gc.get_objects()))
"""
    assert python(code) == "0\n"


@pytest.mark.slow
def test_faults_that_are_put_into_the_code_are_found() -> None:
    done = simulate("--find-seeded", "two_leaders_write", "a_lost_wake_up", "a_relay_of_the_former_leader")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_seeded_fault_is_found() -> None:
    done = simulate("--find-seeded")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_simulated_run_has_the_ledger_of_a_real_one(cluster, monkeypatch) -> None:
    """Real processes, sockets and Redis for the service; the same engine and the same data set by formula."""
    monkeypatch.setattr(engine, "list_shards", list_shards)
    monkeypatch.setattr(known_jobs, "JobWork", SimulatedJobWork)
    cluster.start_reorder()
    job = cluster.submit(job_spec("job", steps=STEPS, ranks=RANKS, window=4, substitute=False))
    with preprocessing(cluster.endpoint):
        ranks = [threading.Thread(target=commit_all, args=(cluster.endpoint, job, rank)) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    real = [[list(entry.samples), entry.loss] for entry in cluster.ledger(job)]
    assert len(real) == STEPS
    assert simulated_ledger() == real


@contextlib.contextmanager
def preprocessing(reorder: str) -> Any:
    """Two engines in a thread of this process, during the block."""
    loop = asyncio.new_event_loop()

    async def run() -> None:
        ports = free_ports(2)
        async with asyncio.TaskGroup() as group:
            for number, port in enumerate(ports):
                group.create_task(run_preprocessor(number, f"127.0.0.1:{port}", reorder))

    running = loop.create_task(run())

    def main() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(running)
        loop.close()

    thread = threading.Thread(target=main)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(running.cancel)
        thread.join()


def commit_all(endpoint: str, job: str, rank: int) -> None:
    """A rank that commits every step as soon as it is planned."""
    client = SessionClient(endpoint, job, rank, RANKS)
    client.open([LoaderState(job=job)])
    for event in client.events():
        if event.WhichOneof("event") == "plan":
            client.commit(event.plan.step, (), float(event.plan.step), 1.0, 0.1)
    client.close()


def simulated_ledger() -> list[Any]:
    code = f"""
from tests.simulation import determinism
determinism.install()
import json
from tests.simulation.simulation_run import undisturbed
print(json.dumps(undisturbed({RANKS}, {STEPS}, False).ledger))
"""
    return [[entry[0], entry[2]] for entry in map(json.loads, json.loads(python(code)))]


def python(code: str) -> str:
    """What a program prints, run as the simulation is."""
    environment = {**os.environ, "PYTHONHASHSEED": "0", "HEADRACE_RELAY": "0"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment).stdout
