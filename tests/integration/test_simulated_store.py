"""The simulated Redis server does what a real one does with the commands and scripts of Headrace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.reorder_service.store import redis_database
from tests.redis_server import RedisServer
from tests.simulation.simulated_redis import SimulatedRedis

pytestmark = pytest.mark.integration

TEXTS, LISTS, HASHES = ("text", "other text"), ("list", "other list"), ("hash", "other hash")
KEYS = (*TEXTS, *LISTS, *HASHES, "headrace:term", "headrace:leader")

words = st.sampled_from(["a", "b", "ü", "7"])
places = st.integers(-4, 4).map(str)


def of(keys: Sequence[str], name: str, *arguments: st.SearchStrategy[str]) -> st.SearchStrategy[tuple[str, ...]]:
    return st.tuples(st.just(name), st.sampled_from(keys), *arguments)


reads = st.one_of(
    of(TEXTS, "GET"),
    of(KEYS, "EXISTS"),
    of(TEXTS, "GETRANGE", st.integers(0, 4).map(str), st.integers(0, 9).map(str)),
    of(HASHES, "HGET", words),
    of(HASHES, "HLEN"),
    of(HASHES, "HEXISTS", words),
    of(LISTS, "LINDEX", places),
    of(LISTS, "LLEN"),
    of(LISTS, "LRANGE", places, places),
)
writes = st.one_of(
    of(TEXTS, "SET", st.sampled_from(["a", "bc"])),
    of(TEXTS, "SETRANGE", st.integers(0, 6).map(str), st.sampled_from(["a", "bc"])),
    of(KEYS[:6], "DEL"),
    of(KEYS[:6], "UNLINK"),
    of(HASHES, "HSET", words, words),
    of(HASHES, "HSETNX", words, words),
    of(HASHES, "HDEL", words),
    of(HASHES, "HINCRBY", st.just("number"), places),
    of(LISTS, "RPUSH", words),
    of(LISTS, "LTRIM", places, places),
    of(LISTS, "LREM", st.just("0"), words),
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


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(requests=st.lists(reads | writes | scripts, max_size=25))
def test_both_give_the_same_replies_and_keep_the_same_data(real: redis.Redis, requests: list[tuple[str, ...]]) -> None:
    real.flushall()
    simulated = SimulatedRedis(lambda: 0.0)
    for name, *words in requests:
        if name.startswith("_"):
            text = getattr(redis_database, name)
            keys = ["headrace:term", "headrace:leader"][: 1 if name == "_WRITE" else 2]
            assert simulated.script(text, keys, words) == real.eval(text, len(keys), *keys, *words), (name, words)
        else:
            assert simulated.command(name, *words) == _plain(real.execute_command(name, *words)), (name, words)
    for key in KEYS:
        assert simulated.data.get(key) == _value(real, key), key


def test_a_lease_ends_by_the_servers_clock() -> None:
    now_s = [0.0]
    simulated = SimulatedRedis(lambda: now_s[0])
    simulated.command("SET", "headrace:leader", "one", "PX", "1500")
    now_s[0] = 1.4
    assert simulated.command("GET", "headrace:leader") == "one"
    now_s[0] = 1.5
    assert simulated.command("GET", "headrace:leader") is None


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
    return real.hgetall(key) if kind == "hash" else real.get(key)
