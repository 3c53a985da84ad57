"""A store that is full, read-only, of another release or somebody else's: one sentence, nothing is changed, and it goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
import redis

from headrace.errors import ConflictError, UnavailableError
from headrace.reorder_service.service import ReorderService
from headrace.reorder_service.store.redis_database import FORMAT, Database
from headrace.reorder_service.store.state import StateStore
from headrace.spec import parse_spec
from headrace.topology_spec import TopologySpec
from tests.redis_server import RedisServer
from tests.unit.reorder_service.job_world import consume, end, names, submit, until


@pytest.fixture
async def service(server: RedisServer) -> AsyncIterator[ReorderService]:
    service = ReorderService(await StateStore.open(server.url))
    await service.store.database.lead("test")
    await service.start()
    yield service
    await end(service)


def fill(client: redis.Redis) -> None:
    client.config_set("maxmemory", 1)


def empty(client: redis.Redis) -> None:
    client.config_set("maxmemory", 0)


def make_read_only(client: redis.Redis) -> None:
    """As a replica is, after a failover that its clients have not noticed."""
    client.replicaof("127.0.0.1", "1")


def make_master(client: redis.Redis) -> None:
    client.replicaof("NO", "ONE")


@pytest.mark.parametrize(
    ("spoil", "mend", "reason"), [(fill, empty, "used memory"), (make_read_only, make_master, "read only replica")]
)
async def test_one_that_takes_no_writes_holds_changes_up_and_the_job_goes_on_when_it_does(
    service: ReorderService,
    server: RedisServer,
    spoil: Callable[[redis.Redis], None],
    mend: Callable[[redis.Redis], None],
    reason: str,
) -> None:
    run = await submit(service)
    session = run.open_session(0, 1)
    assert await consume(run, session, stop=2) == [0, 1]
    decoded = service.fleet.members["p"].kept
    await until(lambda: len(planned := run.cursor.planned) == 2 and len(decoded) == sum(len(step.parts) for step in planned))
    key = "headrace:{job}:job"
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        before = client.hgetall(key)
        spoil(client)
        ledger, planned, kept = client.lrange("headrace:{job}:ledger", 0, -1), run.cursor.planned, dict(decoded)
        for change in (
            run.pause(True),
            run.cancel(),
            run.set_weights(5, {"d": 1.0}),
            run.rewind(1),
            run.set_topology(TopologySpec(replicas=1)),
            service.submit(parse_spec({"name": "other", "sources": [{"path": "/d"}]}).to_json()),
        ):
            with pytest.raises(UnavailableError, match=f"the state store refuses or does not answer: .*{reason}") as caught:
                await change
            assert "\n" not in str(caught.value)
        assert client.hgetall(key) == before
        assert client.lrange("headrace:{job}:ledger", 0, -1) == ledger
        assert client.lrange("headrace:jobs", 0, -1) == ["job"]
        assert (run.cursor.state, run.cursor.committed, run.paused, run.generation) == ("RUNNING", 2, False, 1)
        assert (run.cursor.planned, decoded, session.over) == (planned, kept, None)
        mend(client)
    assert await consume(run, run.open_session(0, 1)) == [2, 3, 4, 5]
    assert sorted(name for step in await names(run) for name in step) == sorted(f"d/a/{n}" for n in range(24))


@pytest.mark.parametrize("found", ["3", str(int(FORMAT) + 1), "banana"])
async def test_one_of_another_format_is_refused_and_left_as_it_is(server: RedisServer, found: str) -> None:
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        client.rpush("headrace:jobs", "job")
        client.set("headrace:format", found)
        before = sorted(client.keys())
        with pytest.raises(ConflictError, match=rf"by another release \(format '{found}', not {FORMAT}\); name another one"):
            await Database.open(server.url)
        assert sorted(client.keys()) == before
        assert client.get("headrace:format") == found


async def test_one_that_is_somebody_elses_is_left_as_it_is_beside_ours(server: RedisServer) -> None:
    """Nothing but keys below `headrace:` is read or written."""
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        client.set("celery", "x")
        client.rpush("jobs", "y")
        store = await StateStore.open(server.url)
        await store.database.lead("test")
        await store.create_job("job", "{}")
        await store.close()
        assert (client.get("celery"), client.lrange("jobs", 0, -1)) == ("x", ["y"])
        assert {key.partition(":")[0] for key in client.scan_iter()} == {"celery", "jobs", "headrace"}


async def test_one_whose_keys_somebody_else_has_taken_is_refused_in_a_sentence(server: RedisServer) -> None:
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        client.set("headrace:jobs", "not a list")
        client.set("headrace:format", FORMAT)
        store = await StateStore.open(server.url)
        with pytest.raises(ConflictError, match=r"the state store was changed by somebody else: .*WRONGTYPE"):
            await store.jobs()
        await store.close()
        assert client.get("headrace:jobs") == "not a list"
