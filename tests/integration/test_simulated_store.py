"""The simulated Redis server does what a real one does with the commands and scripts of Headrace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from headrace.reorder_service.store import finished_jobs, redis_database, step_ledger
from tests.examples import with_examples
from tests.redis_server import RedisServer
from tests.simulation.simulated_redis import SimulatedRedis

pytestmark = pytest.mark.integration

TEXTS, LISTS, HASHES, SETS = ("text", "other text"), ("list", "other list"), ("hash", "other hash"), ("set", "other set")
KEYS = (*TEXTS, *LISTS, *HASHES, *SETS, "headrace:term", "headrace:leader", "headrace:writes")

KEYS_OF = {
    "_LEAD": ["headrace:term", "headrace:leader"],
    "_RENEW": ["headrace:term", "headrace:leader", "headrace:writes"],
    "_WRITE": ["headrace:term", "headrace:writes"],
}

words = st.sampled_from(["a", "b", "ü", "7"])
places = st.integers(-4, 4).map(str)
scores = st.integers(0, 3).map(str) | st.sampled_from(["-inf", "+inf"])


def of(keys: Sequence[str], name: str, *arguments: st.SearchStrategy[str]) -> st.SearchStrategy[tuple[str, ...]]:
    return st.tuples(st.just(name), st.sampled_from(keys), *arguments)


reads = st.one_of(
    of(TEXTS, "GET"),
    of(KEYS, "EXISTS"),
    of(TEXTS, "GETRANGE", st.integers(0, 4).map(str), st.integers(0, 9).map(str)),
    of(HASHES, "HGET", words),
    of(HASHES, "HLEN"),
    of(HASHES, "HMGET", words, words),
    of(LISTS, "LPOS", words),
    of(SETS, "ZREVRANGEBYSCORE", scores, scores, st.just("LIMIT"), st.just("0"), st.just("2")),
    of(HASHES, "HEXISTS", words),
    of(LISTS, "LINDEX", places),
    of(LISTS, "LLEN"),
    of(LISTS, "LRANGE", places, places),
)
writes = st.one_of(
    of(TEXTS, "SET", st.sampled_from(["a", "bc"])),
    of(TEXTS, "SET", st.just("bc"), st.just("NX")),
    st.just(("INCR", "headrace:writes")),
    of(TEXTS, "SETRANGE", st.integers(0, 6).map(str), st.sampled_from(["a", "bc"])),
    of(KEYS[:8], "DEL"),
    of(KEYS[:8], "UNLINK"),
    of(HASHES, "HSET", words, words),
    of(HASHES, "HSETNX", words, words),
    of(HASHES, "HDEL", words),
    of(HASHES, "HINCRBY", st.just("number"), places),
    of(LISTS, "RPUSH", words),
    of(LISTS, "LTRIM", places, places),
    of(LISTS, "LREM", st.sampled_from(["0", "1"]), words),
    of(SETS, "ZADD", st.integers(0, 3).map(str), words),
    of(SETS, "ZREMRANGEBYSCORE", scores, scores),
)
conditions = st.tuples(words, st.just("HGET"), st.sampled_from(HASHES), words) | st.tuples(
    st.sampled_from(["0", "1"]), st.just("EXISTS"), st.sampled_from(TEXTS)
)
names = st.sampled_from(["one", "two"])
scripts = st.one_of(
    st.tuples(st.just("_LEAD"), names, st.just("60000"), st.sampled_from(["0", "1"]), st.sampled_from(["x1", "x2"])),
    st.tuples(st.just("_RENEW"), st.sampled_from(["1 x1", "2 x2", ""]), names, st.sampled_from(["60000", "0"])),
    st.tuples(
        st.just("_WRITE"),
        st.sampled_from(["1 x1", "2 x2", ""]),
        st.lists(conditions, max_size=2).map(json.dumps),
        st.lists(writes, min_size=1, max_size=3).map(json.dumps),
    ),
)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Any:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    with redis.Redis(port=server.port, decode_responses=True) as client:
        yield client
    server.kill()


@pytest.mark.slow
@with_examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(requests=st.lists(reads | writes | scripts, max_size=25))
def test_both_give_the_same_replies_and_keep_the_same_data(real: redis.Redis, requests: list[tuple[str, ...]]) -> None:
    real.flushall()
    simulated = SimulatedRedis(lambda: 0.0)
    for name, *words in requests:
        if name.startswith("_"):
            text = getattr(redis_database, name)
            keys = KEYS_OF[name]
            assert simulated.script(text, keys, words) == real.eval(text, len(keys), *keys, *words), (name, words)
        else:
            assert simulated.command(name, *words) == _plain(real.execute_command(name, *words)), (name, words)
    for key in KEYS:
        assert simulated.data.get(key) == _value(real, key), key


@pytest.mark.slow
def test_scripts_that_reply_with_lists_reply_alike(real: redis.Redis) -> None:
    real.flushall()
    simulated, job, ledger = SimulatedRedis(lambda: 0.0), "headrace:{job}:job", "headrace:{job}:ledger"
    for command in (
        ("HSET", job, "generation", "3", "paged", "2", "state", "RUNNING"),
        *(("RPUSH", ledger, f'{{"step": {step}}}') for step in range(2, 7)),
        ("RPUSH", "headrace:jobs", "job"),
    ):
        simulated.command(*command)
        real.execute_command(*command)
    for text, keys, args in (
        (step_ledger._READ, [job, ledger], ["3", "2", "1000"]),
        (step_ledger._READ, [job, ledger], ["0", "2", "1000"]),
        (finished_jobs._READ, [], ['["state", "message"]', f'["{job}", "nothing"]']),
        (finished_jobs._UNFINISHED, ["headrace:jobs"], ["0", "-1", "DONE"]),
        (finished_jobs._UNFINISHED, ["headrace:jobs"], ["0", "-1", "RUNNING"]),
    ):
        assert simulated.script(text, keys, args) == real.eval(text, len(keys), *keys, *args)


@pytest.mark.slow
def test_a_lease_ends_by_the_servers_clock() -> None:
    now_s = [0.0]
    simulated = SimulatedRedis(lambda: now_s[0])
    simulated.command("SET", "headrace:leader", "one", "PX", "1500")
    now_s[0] = 1.4
    assert simulated.command("GET", "headrace:leader") == "one"
    now_s[0] = 1.5
    assert simulated.command("GET", "headrace:leader") is None


@pytest.mark.slow
def test_a_server_that_is_put_back_has_what_it_had() -> None:
    now_s = [0.0]
    simulated = SimulatedRedis(lambda: now_s[0])
    for second in range(5):
        now_s[0] = float(second)
        simulated.command("RPUSH", "ledger", str(second))
        simulated.command("HINCRBY", "job", "cursor", "1")
    simulated.put_back(2.0)
    assert simulated.data == {"ledger": ["0", "1", "2"], "job": {"cursor": "3"}}


def _plain(reply: Any) -> Any:
    return {True: "OK"}.get(reply, reply) if isinstance(reply, bool) and reply is True else reply


def _value(real: redis.Redis, key: str) -> Any:
    kind = real.type(key)
    if kind == "list":
        return real.lrange(key, 0, -1)
    if kind == "zset":
        return dict(real.zrange(key, 0, -1, withscores=True))
    return real.hgetall(key) if kind == "hash" else real.get(key)
