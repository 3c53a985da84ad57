"""A Redis server in memory: the commands that Headrace uses, its Lua scripts, and a journal by which it is put back.

It does what a real one does with these commands (tests/integration/test_simulated_store.py compares the two), and refuses others.
Scripts run in a real Lua; ranges of a text are of ASCII text. A server that is full refuses commands that need memory, except in
a script that has written already, as Redis does; one that is read-only refuses all writes.
"""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from lupa import lua51
from redis.exceptions import ReadOnlyError, ResponseError


class SortedSet(dict[str, float]):
    """A sorted set: member -> score."""

    def between(self, low: str, high: str) -> list[str]:
        """The members whose scores lie between two limits, which count, from the lowest score to the highest."""
        found = [(score, member) for member, score in self.items() if float(low) <= score <= float(high)]
        return [member for _, member in sorted(found)]


Value = str | list[str] | dict[str, str] | SortedSet
"""What a key holds. A write puts another value in its place, and changes none: the journal keeps the former ones."""

_FREEING = {"DEL", "UNLINK", "HDEL", "LTRIM", "LREM", "ZREMRANGEBYSCORE"}  # commands that a full server carries out

_lua = lua51.LuaRuntime(unpack_returned_tuples=False)
_compiled: dict[str, Any] = {}


def _script(text: str) -> Any:
    if text not in _compiled:
        _compiled[text] = _lua.execute(f"return function(redis, cjson, KEYS, ARGV)\n{text}\nend")
    return _compiled[text]


def _to_lua(value: Any) -> Any:
    if isinstance(value, list):
        return _lua.table_from([_to_lua(item) for item in value])
    return False if value is None else value


def _from_lua(value: Any) -> Any:
    """A script's reply as Redis makes it: numbers without fractions, tables up to their first false."""
    if lua51.lua_type(value) == "table":
        items = (value[place] for place in itertools.count(1))
        return [_from_lua(item) for item in itertools.takewhile(lambda item: item is not None, items)]
    if value is True:
        return 1
    return None if value is False else int(value) if isinstance(value, float) else value


def _encoded(value: Any) -> str:
    """cjson.encode of a value; here, tables are lists."""
    return json.dumps(_listed(value), ensure_ascii=False, separators=(",", ":"))


def _listed(value: Any) -> Any:
    return [_listed(value[place + 1]) for place in range(len(value))] if lua51.lua_type(value) == "table" else value


_CJSON = _lua.table_from({"decode": lambda text: _to_lua(json.loads(text)), "encode": _encoded})


class SimulatedRedis:
    """The data of one server, and what is done to them. `now_s`: the server's wall clock."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.now_s = now_s
        self.data: dict[str, Value] = {}
        self._ends_s: dict[str, float] = {}  # key -> when it expires
        self._journal: list[tuple[float, str, Value | None, float | None]] = []
        """(time, key, value before, end before) of each change, the oldest first."""
        self.is_full = False
        self.is_read_only = False
        self._has_written = False  # the present script
        this = weakref.proxy(self)  # Python's collector does not see what Lua refers to: a cycle over it would stay for good
        self._redis = _lua.table_from({"call": lambda *words: _to_lua(this._command(words))})

    # -- whole requests -----------------------------------------------------------------------------------------------

    def command(self, *words: str | int | float) -> Any:
        """Carry out one command and return its reply; raises ResponseError as redis-py does."""
        self._has_written = False
        return self._command(words)

    def script(self, text: str, keys: Sequence[str], args: Sequence[str]) -> Any:
        """Run a script as EVAL does, and return its reply."""
        self._has_written = False
        reply = _script(text)(self._redis, _CJSON, _lua.table_from(list(keys)), _lua.table_from(list(args)))
        return _from_lua(reply)

    @property
    def num_changes(self) -> int:
        """How many changes the journal has."""
        return len(self._journal)

    def keys_changed_since(self, num_changes: int) -> set[str]:
        """The keys whose values are others than before the changes after these many."""
        before: dict[str, Value | None] = {}
        for _, key, value, _ in self._journal[num_changes:]:
            before.setdefault(key, value)
        return {key for key, value in before.items() if self.data.get(key) != value}

    def put_back(self, to_s: float) -> None:
        """Undo all that was done after this time, as a server does that comes back from an older file or replica."""
        while self._journal and self._journal[-1][0] > to_s:
            _, key, value, end_s = self._journal.pop()
            self._set(key, value, end_s)

    def _set(self, key: str, value: Value | None, end_s: float | None) -> None:
        self.data.pop(key, None)
        self._ends_s.pop(key, None)
        if value is not None:
            self.data[key] = value
        if end_s is not None:
            self._ends_s[key] = end_s

    def _command(self, words: Sequence[Any]) -> Any:
        name, *args = [word if type(word) is str else str(word) for word in words]
        if (act := _READS.get(name)) is not None:
            self._expire(args[:1])
            return act(self.data, *args)
        if (act := _WRITES.get(name)) is None:
            raise ResponseError(f"unknown command {name!r}: add it to the simulated server")
        if self.is_read_only:
            raise ReadOnlyError("You can't write against a read only replica.")
        if self.is_full and not self._has_written and name not in _FREEING:
            raise ResponseError("OOM command not allowed when used memory > 'maxmemory'.")
        self._has_written = True
        keys = args if name in ("DEL", "UNLINK") else args[:1]
        self._expire(keys)
        for key in keys:
            self._journal.append((self.now_s(), key, self.data.get(key), self._ends_s.get(key)))
        reply = act(self.data, *args)
        for key in keys:
            if key not in self.data or (name == "SET" and reply == "OK"):
                self._ends_s.pop(key, None)
            if key in self.data and not self.data[key] and self.data[key] != "":
                del self.data[key]
        if name == "SET" and len(args) == 4:
            self._ends_s[args[0]] = self.now_s() + int(args[3]) / 1000
        return reply

    def _expire(self, keys: Sequence[str]) -> None:
        if not self._ends_s:
            return
        for key in keys:
            if key in self._ends_s and self._ends_s[key] <= self.now_s():
                del self._ends_s[key], self.data[key]


Data = dict[str, Any]


def _typed(data: Data, key: str, kind: type) -> Any:
    value = data.get(key)
    if value is not None and type(value) is not kind:
        raise ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")
    return value


def _text(data: Data, key: str) -> str | None:
    found: str | None = _typed(data, key, str)
    return found


def _list(data: Data, key: str) -> list[str]:
    return _typed(data, key, list) or []


def _hash(data: Data, key: str) -> dict[str, str]:
    return _typed(data, key, dict) or {}


def _sorted_set(data: Data, key: str) -> SortedSet:
    return _typed(data, key, SortedSet) or SortedSet()


def _highest(data: Data, key: str, high: str, low: str, *limit: str) -> list[str]:
    members = _sorted_set(data, key).between(low, high)[::-1]
    if not limit:
        return members
    _, offset, count = limit
    return members[int(offset) : int(offset) + int(count)]


def _place(data: Data, key: str, value: str) -> int | None:
    values = _list(data, key)
    return values.index(value) if value in values else None


def _range(data: Data, key: str, start: str, stop: str) -> slice:
    size = len(_list(data, key))
    first, last = (int(place) + size if int(place) < 0 else int(place) for place in (start, stop))
    return slice(max(0, first), max(0, last + 1))


def _lindex(data: Data, key: str, place: str) -> str | None:
    values, index = _list(data, key), int(place)
    return values[index] if -len(values) <= index < len(values) else None


def _getrange(data: Data, key: str, start: str, stop: str) -> str:
    return (_text(data, key) or "")[int(start) : int(stop) + 1]


def _flat(fields: dict[str, str]) -> list[str]:
    return [word for pair in fields.items() for word in pair]


_READS: dict[str, Callable[..., Any]] = {
    "PING": lambda data: "PONG",
    "GET": _text,
    "EXISTS": lambda data, key: int(key in data),
    "GETRANGE": _getrange,
    "HGET": lambda data, key, field: _hash(data, key).get(field),
    "HGETALL": lambda data, key: _flat(_hash(data, key)),
    "HMGET": lambda data, key, *names: [_hash(data, key).get(name) for name in names],
    "HLEN": lambda data, key: len(_hash(data, key)),
    "HEXISTS": lambda data, key, field: int(field in _hash(data, key)),
    "HSCAN": lambda data, key, cursor, *_: ["0", _flat(_hash(data, key))],
    "LINDEX": _lindex,
    "LPOS": _place,
    "LLEN": lambda data, key: len(_list(data, key)),
    "LRANGE": lambda data, key, start, stop: _list(data, key)[_range(data, key, start, stop)],
    "ZREVRANGEBYSCORE": _highest,
}


def _delete(data: Data, *keys: str) -> int:
    return sum(data.pop(key, None) is not None for key in keys)


def _put(data: Data, key: str, value: str, *how: str) -> str | None:
    if "NX" in how and key in data:
        return None
    data[key] = value
    return "OK"


def _incr(data: Data, key: str) -> int:
    number = int(_text(data, key) or 0) + 1
    data[key] = str(number)
    return number


def _setrange(data: Data, key: str, start: str, value: str) -> int:
    text = (_text(data, key) or "").ljust(int(start), "\0")
    data[key] = text[: int(start)] + value + text[int(start) + len(value) :]
    return len(data[key])


def _hset(data: Data, key: str, *words: str) -> int:
    fields = _hash(data, key)
    before = len(fields)
    data[key] = fields | dict(zip(words[::2], words[1::2], strict=True))
    return len(data[key]) - before


def _hsetnx(data: Data, key: str, field: str, value: str) -> int:
    return 0 if field in _hash(data, key) else _hset(data, key, field, value)


def _hdel(data: Data, key: str, *names: str) -> int:
    fields = _hash(data, key)
    left = {name: value for name, value in fields.items() if name not in names}
    if len(left) < len(fields):
        data[key] = left
    return len(fields) - len(left)


def _hincrby(data: Data, key: str, field: str, by: str) -> int:
    number = int(_hash(data, key).get(field, "0")) + int(by)
    _hset(data, key, field, str(number))
    return number


def _rpush(data: Data, key: str, *values: str) -> int:
    data[key] = [*_list(data, key), *values]
    return len(data[key])


def _ltrim(data: Data, key: str, start: str, stop: str) -> str:
    if key in data:
        data[key] = _list(data, key)[_range(data, key, start, stop)]
    return "OK"


def _lrem(data: Data, key: str, count: str, value: str) -> int:
    values = _list(data, key)
    places = [place for place, item in enumerate(values) if item == value][: int(count) or None]
    if places:
        data[key] = [item for place, item in enumerate(values) if place not in places]
    return len(places)


def _zadd(data: Data, key: str, score: str, member: str) -> int:
    members = _sorted_set(data, key)
    data[key] = SortedSet({**members, member: float(score)})
    return int(member not in members)


def _zremrange(data: Data, key: str, low: str, high: str) -> int:
    members = _sorted_set(data, key)
    gone = set(members.between(low, high))
    if gone:
        data[key] = SortedSet({member: score for member, score in members.items() if member not in gone})
    return len(gone)


_WRITES: dict[str, Callable[..., Any]] = {
    "SET": _put,
    "DEL": _delete,
    "UNLINK": _delete,
    "INCR": _incr,
    "SETRANGE": _setrange,
    "HSET": _hset,
    "HSETNX": _hsetnx,
    "HDEL": _hdel,
    "HINCRBY": _hincrby,
    "RPUSH": _rpush,
    "LTRIM": _ltrim,
    "LREM": _lrem,
    "ZADD": _zadd,
    "ZREMRANGEBYSCORE": _zremrange,
}
