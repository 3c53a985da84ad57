"""One of several processes on a store leads; what another one writes is refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis

from headrace.errors import SupersededLeaderError, UnavailableError
from headrace.reorder_service import leadership
from headrace.reorder_service.jobs.stopping import stop_task
from headrace.reorder_service.leadership import Leadership, keep_leading, wait_until_leader
from headrace.reorder_service.service import ReorderService
from headrace.reorder_service.store import redis_database
from headrace.reorder_service.store.progress import StepRecord
from headrace.reorder_service.store.redis_database import Database, Lease
from headrace.reorder_service.store.state import StateStore
from tests.redis_server import RedisServer

PATIENCE_S = 10.0
LEASE_S = 1.0
Open = Callable[[], Awaitable[Database]]


@pytest.fixture
async def open_another(redis_url: str) -> AsyncIterator[Open]:
    """Connections of different processes to one server."""
    with redis.Redis.from_url(redis_url) as client:
        client.flushdb()
    opened: list[Database] = []

    async def connect() -> Database:
        opened.append(await Database.open(redis_url))
        return opened[-1]

    yield connect
    for one in opened:
        await one.close()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_database, "LEASE_S", LEASE_S)
    monkeypatch.setattr(leadership, "LEASE_S", LEASE_S)
    monkeypatch.setattr(leadership, "RENEW_S", 0.05)
    monkeypatch.setattr(leadership, "POLL_S", 0.02)


async def renew(database: Database) -> bool:
    """Renew the lease of `a:1 x`, and have the database take note."""
    async with database.lease("a:1 x") as lease:
        renewed = await lease.renew()
    await asyncio.sleep(0)
    return renewed


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask the server again and again."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():  # noqa: ASYNC110 - polls a real server
            await asyncio.sleep(0.01)


async def knows(leadership: Leadership, leader: str) -> bool:
    return leadership.leader == leader


async def takes_over(database: Database) -> bool:
    """As if the leader's lease had run out."""
    await database.client.delete("headrace:leader")
    return await database.lead("b:1 y")


async def test_one_leads_at_a_time_and_each_term_is_larger(open_another: Open) -> None:
    first, second = await open_another(), await open_another()
    assert await first.lead("a:1 x")
    assert not await second.lead("b:1 y")
    assert await second.leader() == "a:1 x"
    await first.resign("a:1 x")
    assert await second.lead("b:1 y")
    assert second.term == first.term + 1


async def test_a_lease_that_is_not_renewed_ends(open_another: Open) -> None:
    first, second = await open_another(), await open_another()
    assert await first.lead("a:1 x")
    await until(lambda: second.lead("b:1 y"))
    assert not await renew(first)


async def test_a_lease_that_ran_out_goes_on_where_nobody_else_has_led(open_another: Open) -> None:
    first = await open_another()
    assert await first.lead("a:1 x")
    await first.client.delete("headrace:leader")
    assert await renew(first)
    assert await first.leader() == "a:1 x"


async def test_a_leader_that_was_replaced_writes_nothing(open_another: Open) -> None:
    first, second = await open_another(), await open_another()
    await first.lead("a:1 x")
    former = StateStore(first)
    assert await former.create_job("job", "{}")
    await first.resign("a:1 x")
    await second.lead("b:1 y")
    record = StepRecord(samples=("s",), loss=1.0, step_s=1.0, data_wait_s=0.0)
    for write in (
        former.commit_step("job", 0, record, []),
        former.set_state("job", "FAILED"),
        former.rewind("job", 0),
        former.create_job("other", "{}"),
        former.save_probes("job", 0, [], [], []),
        former.set_paused("job", True),
        former.set_topology("job", "{}", "", "", 2),
    ):
        with pytest.raises(SupersededLeaderError, match="another reorder service leads"):
            await write
    latter = StateStore(second)
    found = await latter.load_job("job")
    assert (found.state, found.cursor, found.paused, found.generation) == ("INDEXING", 0, False, 1)
    assert await latter.jobs() == ["job"]
    await latter.commit_step("job", 0, record, [])


async def test_of_two_that_led_in_one_term_of_a_store_that_was_put_back_one_goes_on(server: RedisServer, tmp_path: Path) -> None:
    first, second, third = [await Database.open(server.url) for _ in range(3)]
    await first.lead("a:1 x")
    await first.resign("a:1 x")
    server.keep(tmp_path / "a second ago")
    assert await second.lead("b:1 y")
    server.put_back(tmp_path / "a second ago")
    assert await third.lead("c:1 z")
    assert third.term == second.term == first.term + 1
    assert [await renew(one) for one in (first, second, third)] == [False, False, True]
    for former in (first, second):
        with pytest.raises(SupersededLeaderError):
            await StateStore(former).create_job("job", "{}")
    assert await StateStore(third).create_job("job", "{}")
    for one in (first, second, third):
        await one.close()


async def test_a_leader_finds_out_that_its_store_was_put_back(server: RedisServer, tmp_path: Path) -> None:
    """By its writes or by the renewals of its lease, whichever comes first."""
    first = await Database.open(server.url)
    await first.lead("a:1 x")
    await first.write(("SET", "headrace:x", 1))
    server.keep(tmp_path / "a second ago")
    await asyncio.gather(*(first.write(("SET", "headrace:x", n)) for n in range(9)), *(renew(first) for _ in range(9)))
    assert not first.put_back.is_set()
    server.put_back(tmp_path / "a second ago")
    assert await renew(first)
    assert first.put_back.is_set()
    first.put_back.clear()
    assert await renew(first)
    assert not first.put_back.is_set(), "once is enough"
    await first.write(("SET", "headrace:x", 2))
    server.put_back(tmp_path / "a second ago")
    await first.write(("SET", "headrace:x", 3))
    assert first.put_back.is_set()
    await first.close()


async def test_a_leader_whose_store_was_replaced_by_an_empty_one_leads_there_anew(server: RedisServer) -> None:
    first = await Database.open(server.url)
    await first.lead("a:1 x")
    assert await StateStore(first).create_job("job", "{}")
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    assert not await renew(first)
    with pytest.raises(SupersededLeaderError):
        await StateStore(first).create_job("other", "{}")
    assert await first.lead("a:1 x")
    assert await StateStore(first).create_job("job", "{}")
    again = await Database.open(server.url)  # as after a restart: the store is one of this release
    for one in (first, again):
        await one.close()


async def test_a_candidacy_that_is_sent_twice_begins_one_term(open_another: Open) -> None:
    first = await open_another()
    args = ["a:1 x", "1000", "0", "id"]
    keys = ["headrace:term", "headrace:leader"]
    assert await first._lead(keys=keys, args=args) == await first._lead(keys=keys, args=args) == 1
    assert await first.lead("a:1 x")
    assert first.term == 2


async def test_a_store_of_the_release_before_goes_on_with_its_terms(server: RedisServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.mset({"headrace:format": "4", "headrace:term": "7"})
        client.rpush("headrace:jobs", "job")
    first = await Database.open(server.url)
    assert await first.lead("a:1 x")
    assert first.term == 8
    await first.close()


@pytest.mark.timeout(60)
async def test_any_number_of_commands_at_a_time_is_carried_out_and_the_lease_waits_for_none(
    open_another: Open, redis_url: str
) -> None:
    first = await open_another()
    await first.lead("a:1 x")
    await first.client.rpush("headrace:jobs", "job")
    busy = asyncio.gather(*(first.read(first.client.blpop(["headrace:none"], timeout=30)) for _ in range(64)))
    waiting = asyncio.gather(*(first.write(("RPUSH", "headrace:x", n)) for n in range(500)))
    assert await renew(first)
    assert not busy.done()
    with redis.Redis.from_url(redis_url) as client:
        client.rpush("headrace:none", *range(64))
    await busy
    assert sum(await waiting) == 500
    assert await first.client.llen("headrace:x") == 500


async def test_who_stands_by_takes_over(open_another: Open) -> None:
    first, second, leadership = await open_another(), await open_another(), Leadership()
    await first.lead("a:1 x")
    waiting = asyncio.create_task(wait_until_leader(second, "b:1 y", leadership))
    await until(lambda: knows(leadership, "a:1 x"))
    with pytest.raises(UnavailableError, match="stands by; a:1 leads"):
        _ = leadership.service
    await first.resign("a:1 x")
    async with asyncio.timeout(PATIENCE_S):
        await waiting
    assert leadership.leader == "b:1 y"


async def test_a_leader_that_cannot_renew_serves_nobody_new_until_it_can(
    open_another: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await open_another(), await open_another()
    await first.lead("a:1 x")
    served: list[bool] = []
    changed = asyncio.Event()

    async def serve(serving: bool) -> None:
        served.append(serving)
        changed.set()

    leadership = Leadership()
    leadership.active_service, leadership.lease_ends_s = ReorderService(StateStore(first)), time.monotonic() + LEASE_S
    keeping = asyncio.create_task(keep_leading(first, "a:1 x", leadership, serve))
    async with asyncio.timeout(PATIENCE_S):
        with monkeypatch.context() as patch:
            patch.setattr(Lease, "renew", _unavailable)
            await changed.wait()
        assert served == [False]
        with pytest.raises(UnavailableError, match="another one may lead"):
            _ = leadership.service
        changed.clear()
        await changed.wait()
        assert served == [False, True]
        assert leadership.service is leadership.active_service
        await until(lambda: takes_over(second))
        await keeping


async def test_a_leader_that_cannot_renew_for_long_gives_its_work_up(open_another: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    first, leadership = await open_another(), Leadership()
    await first.lead("a:1 x")
    served: list[bool] = []

    async def serve(serving: bool) -> None:
        served.append(serving)

    monkeypatch.setattr(Lease, "renew", _unavailable)
    monkeypatch.setattr("headrace.reorder_service.leadership.GIVE_UP_S", 0.2)
    leadership.lease_ends_s = time.monotonic() + 0.1
    async with asyncio.timeout(PATIENCE_S):
        await keep_leading(first, "a:1 x", leadership, serve)
    assert served == [False]


@asynccontextmanager
async def leading(database: Database, leadership: Leadership) -> AsyncIterator[asyncio.Task[None]]:
    """Lead and renew the lease during the block."""
    await wait_until_leader(database, "a:1 x", leadership)
    leadership.active_service = ReorderService(StateStore(database))
    keeping = asyncio.create_task(keep_leading(database, "a:1 x", leadership, _serve))
    await asyncio.sleep(0.1)
    yield keeping
    await stop_task(keeping)


def hang_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a main loop that is busy for 0.2 s count as hanging, and leases be short."""
    monkeypatch.setattr("headrace.reorder_service.leadership.HANG_S", 0.2)
    monkeypatch.setattr("headrace.reorder_service.leadership.LEASE_S", 0.3)
    monkeypatch.setattr(redis_database, "LEASE_S", 0.3)


async def test_a_main_loop_that_is_busy_for_longer_than_a_lease_keeps_it(open_another: Open) -> None:
    first, second, leadership = await open_another(), await open_another(), Leadership()
    async with leading(first, leadership) as keeping:
        time.sleep(1.5 * LEASE_S)  # noqa: ASYNC251 - as where a thousand ranks open sessions at once
        assert leadership.service is leadership.active_service
        assert not await second.lead("b:1 y")
        assert await first.write(("SET", "headrace:x", 1))
        assert not keeping.done()


async def test_a_main_loop_that_hangs_for_longer_than_the_bound_loses_the_lease(
    open_another: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang_soon(monkeypatch)
    first, second, leadership = await open_another(), await open_another(), Leadership()
    async with leading(first, leadership) as keeping:
        time.sleep(0.8)  # noqa: ASYNC251 - it hangs
        with pytest.raises(UnavailableError, match=r"its event loop was busy for more than 0.2 s\): another one may lead"):
            _ = leadership.service
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: takes_over(second))
            await keeping
        with pytest.raises(SupersededLeaderError):
            await first.write(("SET", "headrace:x", 1))


async def test_a_main_loop_that_hung_goes_on_where_nobody_else_has_led(
    open_another: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang_soon(monkeypatch)
    monkeypatch.setattr("headrace.reorder_service.leadership.GIVE_UP_S", 0.1)
    first, leadership = await open_another(), Leadership()
    async with leading(first, leadership) as keeping:
        time.sleep(0.8)  # noqa: ASYNC251 - it hangs
        assert time.monotonic() > leadership.lease_ends_s
        async with asyncio.timeout(PATIENCE_S):
            while time.monotonic() > leadership.lease_ends_s:  # noqa: ASYNC110 - another thread ends the wait
                await asyncio.sleep(0.01)
        assert not keeping.done()


async def _serve(_serving: bool) -> None:
    pass


async def _unavailable(*_: object) -> bool:
    raise UnavailableError("no answer")


def test_a_process_that_is_starting_says_so() -> None:
    leadership = Leadership()
    leadership.starting = True
    with pytest.raises(UnavailableError, match="this reorder service is starting: it compiles its planner"):
        _ = leadership.service
    leadership.starting = False
    with pytest.raises(UnavailableError, match="stands by; none leads yet"):
        _ = leadership.service
