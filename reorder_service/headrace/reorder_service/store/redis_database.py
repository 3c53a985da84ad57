"""The Redis server behind the state store, and who may write to it.

`redis://HOST:PORT/DB`, `rediss://...` (TLS) and `sentinel://HOST:PORT,HOST:PORT/NAME/DB` name a server of the user's;
`embedded:FOLDER` is a private one (headrace.reorder_service.store.embedded_redis). All of them are used alike from here on.

One process at a time leads: it holds a lease, which ends by itself when it is not renewed, and a term, which is larger than
every former leader's. Each write names the writer's token, and is refused if the store has another one: a leader that hung, and
does not know yet that it was replaced, changes nothing (a fencing token; M. Kleppmann, "How to do distributed locking", 2016).
A token is a term and a random id: a store that was restored from a backup, or failed over to a replica, may give the same term
twice, and the random id tells the two leaders of that term apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import ExponentialBackoff
from redis.exceptions import BusyLoadingError, RedisError

from headrace.errors import ConflictError, SupersededLeaderError, UnavailableError, UserError
from headrace.observability.logs import pairs
from headrace.reorder_service.store.durability import DURABLE, forgetful_settings
from headrace.reorder_service.store.embedded_redis import EmbeddedRedis
from headrace.reorder_service.store.store_refusal import store_refusal
from headrace.reorder_service.store.store_url import is_in_the_clear, without_password

FORMAT = "6"  # of the keys below `headrace:`; raised with every change that an older release would misread
_PLAIN_FORMAT = "5"  # of a store without pages of a ledger; the release before this one reads it, too
_READABLE_FORMAT = "4"  # an older format that can be read as the plain one: its term is a number without an id
LEASE_S = 1.5  # a leader that has not renewed its lease for so long may be replaced
_TIMEOUT_S = 2.0  # with the retries below, a server that hangs is reported within the deadline of a call
_RETRIES = 3
_AT_A_TIME = 64  # commands in flight; each takes a connection, of which a client opens 100 at most
_END_S = 1.0  # within which a server that reset its connections has ended, if it is going to
_LOAD_TIMEOUT_S = 60.0  # a server reads a ledger of a million steps in less
_FORMS = "redis://HOST:PORT/DB, rediss://HOST:PORT/DB, sentinel://HOST:PORT,.../NAME/DB nor embedded:FOLDER"
_TERM, _LEADER, _WRITES = "headrace:term", "headrace:leader", "headrace:writes"
_FORMAT = "headrace:format"

log = logging.getLogger(__name__)

Command = Sequence[str | int]

RAISE_FORMAT: Command = ("SET", _FORMAT, FORMAT)
"""The command that goes with the first page of a ledger: from then on a release that does not know pages refuses the store."""

# Writes if the token is the leader's and all conditions hold, and returns the number of the write. KEYS: term, writes. ARGV: the
# writer's token; conditions, as JSON: [expected answer, command, ...] each; commands, as JSON.
_WRITE = """
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return -1 end
for _, condition in ipairs(cjson.decode(ARGV[2])) do
  local expected = table.remove(condition, 1)
  if tostring(redis.call(unpack(condition))) ~= expected then return 0 end
end
for _, command in ipairs(cjson.decode(ARGV[3])) do redis.call(unpack(command)) end
return redis.call('INCR', KEYS[2])
"""

# Takes the lease and begins a term. KEYS: term, leader. ARGV: the candidate's name, milliseconds of the lease, whether the former
# leader is known to be gone, and the id of the candidate's token. Sent again since its answer was lost, it gives the same term.
_LEAD = """
local leader = redis.call('GET', KEYS[2])
if leader and leader ~= ARGV[1] and ARGV[3] == '0' then return 0 end
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
local term, id = string.match(redis.call('GET', KEYS[1]) or '0', '^(%d+) ?(%w*)$')
if id ~= ARGV[4] then
  term = string.format('%d', term + 1)
  redis.call('SET', KEYS[1], term .. ' ' .. ARGV[4])
end
return tonumber(term)
"""

# Renews or ends the lease, and returns the number of the write. KEYS: term, leader, writes. ARGV: the leader's token, name,
# milliseconds of the lease; 0: it ends now. A lease that ran out is renewed if nobody else has led since: the server may have
# been away, and not this process.
_RENEW = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[3] == '0' then redis.call('DEL', KEYS[2]) else redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3]) end
return redis.call('INCR', KEYS[3])
"""


class Database:
    """Access to the store's Redis server: reads for everybody, and writes that only the leader can do (fencing token).

    All methods raise UnavailableError where the server does not answer or refuses.
    """

    def __init__(self, connect: Callable[[], redis.Redis], embedded: EmbeddedRedis | None = None) -> None:
        self.client = client = connect()
        self._leading = leading = connect()  # connections of its own: who leads waits for nothing else
        self._connect = connect
        self._loop = asyncio.get_running_loop()
        self._turns = asyncio.Semaphore(_AT_A_TIME)
        self.term = 0
        """Term in which this process last led; 0: it never did."""
        self._token = ""
        self._writes = 0  # number of the latest write that is known to have been done
        self.put_back = asyncio.Event()
        """Set when the store was found to have been put back to an earlier moment, and to have lost what this leader wrote."""
        self._embedded = embedded
        self._write = client.register_script(_WRITE)
        self._lead = leading.register_script(_LEAD)
        self._resign = leading.register_script(_RENEW)

    @classmethod
    async def open(cls, url: str) -> Database:
        """Connect to the store at `url`, and start its server where that is embedded.

        Raises UserError where the URL is malformed or nothing answers there, ConflictError where the store is in use (embedded)
        or of another release, UnavailableError where the embedded server does not start or ends.
        """
        embedded = None
        if url.startswith("embedded:"):
            embedded = EmbeddedRedis(Path(url.removeprefix("embedded:")))
            embedded.start()
            connect = functools.partial(redis.Redis, unix_socket_path=str(embedded.socket), **_client_options())
        else:
            connect = functools.partial(_client, url)
        try:
            database = cls(connect, embedded)
        except ValueError as err:
            raise UserError(f"store {without_password(url)!r} is neither {_FORMS}") from err
        client = database.client
        try:
            await _until_loaded(client)
            await _check_format(client, url)
            await _warn_of_loss(client)
            if is_in_the_clear(url):
                log.warning(
                    "the store is not encrypted on its way: whoever reads the network reads its password, jobs and keys %s",
                    pairs(
                        store=without_password(url), remedy="rediss://, or a network that only the service and the store share"
                    ),
                )
        except ConflictError:
            await database.close()
            raise
        except RedisError as err:
            try:
                database.check(_END_S)
            finally:
                await database.close()
            raise UserError(store_refusal(without_password(url), err)) from err
        return database

    def check(self, wait_s: float = 0.0) -> None:
        """Raise UnavailableError where the store's server is embedded and has ended, or ends within `wait_s`."""
        if self._embedded is not None and not self._embedded.is_running(wait_s):
            why = self._embedded.reason()
            raise UnavailableError(
                f"the embedded store's server has ended: {why}; start the reorder service again: nothing is lost"
            )

    @property
    def is_embedded(self) -> bool:
        """Whether the server is a private one of this process."""
        return self._embedded is not None

    async def forgetful_settings(self) -> dict[str, str] | None:
        """Return the server's settings, of now, with which it may forget commits; None where it does not tell them."""
        try:
            return await forgetful_settings(self.client)
        except RedisError as err:
            raise UnavailableError(f"the state store refuses or does not answer: {err}") from err

    async def close(self) -> None:
        await self.client.aclose()
        await self._leading.aclose()
        if self._embedded is not None:
            self._embedded.stop()

    # -- reading and writing ------------------------------------------------------------------------------------------

    async def read(self, command: Any) -> Any:
        """Await a command of `client`, a coroutine, and return its answer.

        Raises ConflictError where a key holds another kind of value than Headrace writes.
        """
        try:
            await self._turns.acquire()
        except asyncio.CancelledError:
            command.close()  # avoids a warning that it was never awaited
            raise
        try:
            return await self._answer(command)
        finally:
            self._turns.release()

    async def _answer(self, command: Awaitable[Any]) -> Any:
        task = asyncio.current_task()
        assert task is not None, "coroutines run in tasks"
        cancelled = task.cancelling()
        try:
            answer = await command
            if task.cancelling() > cancelled:  # the client awaits by `asyncio.wait_for`, which may drop this before Python 3.12
                raise asyncio.CancelledError
            return answer
        except RedisError as err:  # raised also by a server that is full, read-only or loading
            if "WRONGTYPE" in str(err):  # this does not pass by itself
                raise ConflictError(f"the state store was changed by somebody else: {err}") from err
            raise UnavailableError(f"the state store refuses or does not answer: {err}") from err

    async def write(self, *commands: Command, when: Sequence[Command] = ()) -> bool:
        """Carry out all commands in one transaction, or none: return False where a condition does not hold.

        `when`: the conditions, (expected answer, command ...) each.

        Raises SupersededLeaderError where another process has led since.
        """
        args, known = [self._token, _json(when), _json(commands)], self._writes
        number = await self.read(self._write(keys=[_TERM, _WRITES], args=args))
        if number < 0:
            raise SupersededLeaderError(f"another reorder service leads now; this one led in term {self.term}")
        self._note_write(number, known)
        return bool(number)

    def _note_write(self, number: int, known: int) -> None:
        """Note the number of a write, 0 if it was not done. A number that was `known` before it was sent is counted twice."""
        if 0 < number <= known:
            log.warning("the store was put back %s", pairs(term=self.term, lost_writes=known - number + 1))
            self._writes = number
            self.put_back.set()
        self._writes = max(self._writes, number)

    # -- leading ------------------------------------------------------------------------------------------------------

    async def lead(self, name: str) -> bool:
        """Begin a new term, and return True, unless another process has the lease.

        The lease of an embedded store is taken at once, since only its own process uses it. `name`: unique to this process.
        """
        alone = "1" if self._embedded is not None else "0"
        term_id = uuid.uuid4().hex
        term = await self._answer(self._lead(keys=[_TERM, _LEADER], args=[name, _milliseconds(LEASE_S), alone, term_id]))
        if term:
            self.term, self._token, self._writes = int(term), f"{term} {term_id}", 0
            self.put_back.clear()
            await self._answer(self._leading.set(_FORMAT, _PLAIN_FORMAT, nx=True))  # of a store that was replaced by an empty one
        return bool(term)

    @contextlib.asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[Lease]:
        """Open a connection over which the leader renews its lease during the block, in whichever event loop that runs."""
        client = self._connect()
        try:
            yield Lease(self, client, [self._token, name, _milliseconds(LEASE_S)])
        finally:
            await client.aclose()

    async def resign(self, name: str) -> None:
        """Give up the lease, so that another process need not wait until it runs out."""
        await self._answer(self._resign(keys=[_TERM, _LEADER, _WRITES], args=[self._token, name, "0"]))

    async def leader(self) -> str:
        """Return the name of the process that has the lease; empty: nobody has."""
        return str(await self.read(self.client.get(_LEADER)) or "")


class Lease:
    """The leader's lease on the store in one term: a connection for one event loop, which need not be the database's."""

    def __init__(self, database: Database, client: redis.Redis, args: Sequence[str]) -> None:
        """`args`: the script's: token, name, milliseconds."""
        self._database = database
        self._renew = client.register_script(_RENEW)
        self._args = args

    async def renew(self) -> bool:
        """Renew the lease; return False where another process has led since. Raises UnavailableError as the database does."""
        database, known = self._database, self._database._writes
        number = int(await database._answer(self._renew(keys=[_TERM, _LEADER, _WRITES], args=self._args)))
        database._loop.call_soon_threadsafe(database._note_write, number, known)
        return bool(number)


def _client(url: str) -> redis.Redis:
    """Create a client for a redis, rediss or sentinel URL. Raises ValueError where the URL is malformed."""
    if not url.startswith("sentinel://"):
        return redis.Redis.from_url(url, **_client_options())
    parts = urlsplit(url)
    name, _, number = parts.path.strip("/").partition("/")
    hosts, password = parts.netloc.rpartition("@")[2], parts.password
    watchers = [(host, int(port)) for host, _, port in (address.rpartition(":") for address in hosts.split(","))]
    if not name or not all(host for host, _ in watchers):
        raise ValueError(url)
    options = _client_options() | {"db": int(number or 0), "password": password}
    sentinel = Sentinel(watchers, sentinel_kwargs={"socket_timeout": _TIMEOUT_S, "password": password}, **options)  # type: ignore[no-untyped-call]
    client: redis.Redis = sentinel.master_for(name)
    return client


def _client_options() -> dict[str, Any]:
    """Return the options of all clients, with which commands are retried.

    A command is repeated where its answer is lost, and copies of it may arrive late, so every command of ours must bear that.
    """
    retry = Retry(ExponentialBackoff(cap=0.5, base=0.02), _RETRIES)
    return {
        "decode_responses": True,
        "socket_timeout": _TIMEOUT_S,
        "socket_connect_timeout": _TIMEOUT_S,
        "retry": retry,
    }


async def _until_loaded(client: redis.Redis) -> None:
    """Wait until the server answers, for at most _LOAD_TIMEOUT_S: after a restart it reads its file first."""
    deadline = time.monotonic() + _LOAD_TIMEOUT_S
    while True:
        try:
            await client.ping()
            return
        except BusyLoadingError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.1)


async def _check_format(client: redis.Redis, url: str) -> None:
    found = await client.get(_FORMAT)
    if found == _READABLE_FORMAT or not await client.exists("headrace:jobs"):
        await client.set(_FORMAT, _PLAIN_FORMAT)
        found = _PLAIN_FORMAT
    if found not in (FORMAT, _PLAIN_FORMAT):
        raise ConflictError(
            f"the store {without_password(url)} was written by another release (format {found!r}, not {FORMAT}); "
            "name another one, or finish its jobs with that release"
        )


async def _warn_of_loss(client: redis.Redis) -> None:
    """Log a warning where the server's settings let it forget commits; not where it does not tell them."""
    if lacking := await forgetful_settings(client):
        wanted = " ".join(f"--{name} {DURABLE[name]}" for name in lacking)
        log.warning("the store may forget commits %s", pairs(**lacking, remedy=f"start Redis with {wanted}"))


def _json(commands: Sequence[Command]) -> str:
    return json.dumps([[str(word) for word in command] for command in commands], ensure_ascii=False)


def _milliseconds(seconds: float) -> str:
    return str(round(1000 * seconds))
