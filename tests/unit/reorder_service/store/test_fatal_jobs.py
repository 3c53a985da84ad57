"""A job whose planning ends the service is found and set aside; every other job goes on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.errors import UnavailableError
from headrace.reorder_service.store.fatal_jobs import CRASHES_UNTIL_CAREFUL, STRIKES
from headrace.reorder_service.store.redis_database import Command, Database
from headrace.reorder_service.store.state import StateStore
from tests.unit.reorder_service.job_world import Start, submit

SERVICE = """
import asyncio, os, signal, sys
from headrace.errors import NotFoundError
from headrace.reorder_service.service import ReorderService
from headrace.reorder_service.store.state import StateStore
from headrace.reorder_service.jobs.planned_step import PlannedStep
from tests.unit.reorder_service.job_world import Preprocessor, submit

make_plan = PlannedStep.make_plan

def explode(step, spec, *args, **options):
    if spec.name == "poison" and step.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does where memory ends
    return make_plan(step, spec, *args, **options)

async def found(service, name):
    try:
        return await service.load(name)
    except NotFoundError:
        return await submit(service, name=name, join=False, strategy="random")

async def main(url):
    PlannedStep.make_plan = explode
    service = ReorderService(await StateStore.open(url))
    await service.start()
    Preprocessor(service=service).join()
    names = ("good", "poison", "other")
    runs = [await found(service, name) for name in names]
    async with asyncio.timeout(60):
        cursors = [run.cursor for run in runs]
        while not all(c.steps or c.state == "FAILED" for c in cursors) or not any(c.state == "FAILED" for c in cursors):
            await asyncio.sleep(0.01)
    for run in runs:
        print(run.name, run.cursor.state, run.cursor.message)
    await service.stop()
    await service.store.close()

def lead(url):
    child = os.fork()  # of a process that has imported all it needs: nothing but main makes a thread
    if child == 0:
        sys.exit(asyncio.run(main(url)))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

while (code := lead(sys.argv[1])) == -signal.SIGKILL:
    print("killed", flush=True)
sys.exit(code)
"""


def test_it_is_found_and_the_others_go_on(tmp_path: Path) -> None:
    services = subprocess.run(
        [sys.executable, "-c", SERVICE, f"embedded:{tmp_path}"], capture_output=True, text=True, timeout=100, check=False
    )
    assert services.returncode == 0, services.stderr
    *killed, good, poison, other = services.stdout.splitlines()
    assert killed == ["killed"] * (CRASHES_UNTIL_CAREFUL + STRIKES)
    assert (good.split()[1], other.split()[1]) == ("RUNNING", "RUNNING")
    assert poison.startswith("poison FAILED planning a step of job 'poison' ended 3 reorder services in a row")


async def accuse(store: StateStore) -> None:
    """As many leaders as it takes ended while they planned a step of the job, but for the one that is to find it."""
    assert await store.create_job("job", "{}")
    await store.database.write(
        ("SET", "headrace:ends", CRASHES_UNTIL_CAREFUL + STRIKES),
        ("SET", "headrace:noted", "job"),
        ("HSET", "headrace:strikes", "job", STRIKES - 1),
    )


async def test_a_job_that_is_found_has_failed_at_once(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the answer of the store was lost: what was written is written again, and nothing counts twice."""
    await accuse(store)
    write, lost = Database.write, [True]

    async def write_and_lose(database: Database, *commands: Command, when: Sequence[Command] = ()) -> bool:
        done = await write(database, *commands, when=when)
        if lost:
            lost.pop()
            raise UnavailableError("the answer was lost")
        return done

    monkeypatch.setattr(Database, "write", write_and_lose)
    assert await store.fatal_jobs.begin_term() == "job"
    record = await store.load_job("job")
    assert (record.state, "ended 3 reorder services in a row" in record.message) == ("FAILED", True)
    assert await store.database.client.get("headrace:ends") == str(CRASHES_UNTIL_CAREFUL + STRIKES + 1)
    assert not await store.database.client.exists("headrace:noted", "headrace:strikes")


@pytest.mark.parametrize("state", ["CANCELLED", "DONE"])
async def test_a_job_that_is_over_stays_as_it_ended(store: StateStore, state: str) -> None:
    await accuse(store)
    await store.set_state("job", state, "so it ended")
    assert await store.fatal_jobs.begin_term() == "job"
    record = await store.load_job("job")
    assert (record.state, record.message) == (state, "so it ended")


async def test_leaders_that_end_in_order_or_live_long_are_not_counted(store: StateStore) -> None:
    fatal_jobs = store.fatal_jobs
    for _ in range(CRASHES_UNTIL_CAREFUL + STRIKES + 1):
        assert await fatal_jobs.begin_term() == ""
        assert fatal_jobs._turn is None
        await fatal_jobs.reset_counts()
    assert {key async for key in store.database.client.scan_iter()} == {"headrace:format", "headrace:writes"}


async def test_a_leader_that_ends_while_it_plans_nothing_accuses_nobody(store: StateStore) -> None:
    for _ in range(CRASHES_UNTIL_CAREFUL + STRIKES + 1):
        fatal_jobs = store.fatal_jobs
        assert await fatal_jobs.begin_term() == ""
        async with fatal_jobs.guard_planning("job"):
            pass
    assert fatal_jobs._turn is not None


async def test_a_service_that_ends_in_order_leaves_nothing(start: Start) -> None:
    service = await start()
    await submit(service)
    again = await start()
    assert await again.store.database.client.get("headrace:ends") == "1"
    assert again.running_jobs() == ["job"]
