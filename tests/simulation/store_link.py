"""A simulated store: one server, its faults, and clients with the surface of redis-py that Headrace uses.

A client waits for an answer and sends a command again as its options say. So a command may be carried out though its client never
hears of it, once more when it is repeated, and once more, much later, where the network has held a copy back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from redis.exceptions import ConnectionError, ResponseError, TimeoutError

from tests.simulation.network import Network
from tests.simulation.simulated_redis import SimulatedRedis
from tests.simulation.virtual_loop import PROCESS, Process, VirtualLoop

LATE_S = (2.0, 25.0)  # how long a copy is held back after its client gave it up
_ANSWERED_LATER = 0.2  # share of the answers that are on their way for some time; the others come as soon as a command is done


@dataclass(slots=True, eq=False)
class Request:
    """A command or a script as a client sends it; its copies are the same request."""

    client: Process
    act: Callable[[SimulatedRedis], Any]
    done: int = 0
    """How often it was carried out."""


class StoreServer:
    """The store's process: when commands arrive, whether they are answered, and who looks on."""

    def __init__(self, process: Process, network: Network, random: Random) -> None:
        self.process = process
        self._loop: VirtualLoop = process.loop
        self._network = network
        self._random = random
        self.clock_ahead_s = 0.0
        """How far its wall clock is ahead of the true time: leases end by it."""
        self.redis = SimulatedRedis(lambda: self._loop.time() + self.clock_ahead_s)
        self.is_away = False
        """Connections are refused."""
        self.slow_s = 0.0
        """The most that a command takes beyond its usual latency."""
        self.lose_share = 0.0
        """Share of the answers that are lost."""
        self.hold_share = 0.0
        """Share of the commands of which a copy is held back and arrives late."""
        self.on_request: Callable[[Request, SimulatedRedis], None] = lambda _request, _redis: None
        """Called after each request that was carried out."""
        self.num_requests = 0

    def send(self, request: Request, answer: asyncio.Future[Any]) -> None:
        """Deliver a copy of a request; the answer comes if nothing is in its way."""
        if self.is_away:
            self._loop.call_later(self._network.latency_s(), _fail, answer, ConnectionError("Connection refused."))
            return
        slow_s = self._random.random() * self.slow_s if self.slow_s else 0.0
        latency_s = self._network.latency_s() + slow_s
        if self._network.is_silent(request.client, self.process):
            if self._random.random() < 0.5:  # the kernel goes on sending what its process has given up
                self._later(request, self._random.uniform(*LATE_S))
            return
        if self.hold_share and self._random.random() < self.hold_share:
            self._later(request, self._random.uniform(*LATE_S))
            return
        arrives_s = latency_s * 0.5 if self._random.random() < _ANSWERED_LATER else latency_s
        self._loop.call_later(arrives_s, self._arrive, request, answer, latency_s - arrives_s, context=self.process.context)

    def _later(self, request: Request, delay_s: float) -> None:
        self._loop.call_later(delay_s, self._arrive, request, None, 0.0, context=self.process.context)

    def _arrive(self, request: Request, answer: asyncio.Future[Any] | None, back_s: float) -> None:
        if self.is_away:
            if answer is not None:
                _fail(answer, ConnectionError("Connection reset by peer"))
            return
        self.num_requests += 1
        reply: Any
        try:
            reply = request.act(self.redis)
            request.done += 1
        except ResponseError as err:
            reply = err
        self.on_request(request, self.redis)
        if answer is None or (self.lose_share and self._random.random() < self.lose_share):
            return
        if self._network.is_silent(request.client, self.process):
            return
        if back_s:
            self._loop.call_later(back_s, _answer, answer, reply, context=request.client.context)
        else:
            _answer(answer, reply)


def _answer(future: asyncio.Future[Any], reply: Any) -> None:
    if not future.done():
        if isinstance(reply, Exception):
            future.set_exception(reply)
        else:
            future.set_result(reply)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


class StoreClient:
    """redis.asyncio.Redis over the simulated network: `hget(key, field)` and so on, and scripts."""

    def __init__(self, server: StoreServer, options: dict[str, Any]) -> None:
        """`options`: those with which Headrace makes its clients, of which timeout and retries count."""
        process = PROCESS.get()
        assert process is not None
        self._process = process
        self._server = server
        self._timeout_s: float = options["socket_timeout"]
        self._retry = options["retry"]
        self._awaited: deque[tuple[float, asyncio.Future[Any]]] = deque()
        """(when it fails, answer) of the attempts under way, in this order, and of some that have ended."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)

        async def send(*words: Any, **options: Any) -> Any:
            if name == "hmget" and isinstance(words[1], list):
                words = (words[0], *words[1])
            if name == "zrevrangebyscore" and len(words) == 5:
                words = (*words[:3], "LIMIT", *words[3:])
            if options.get("nx"):
                words = (*words, "NX")
            reply = await self._request(lambda redis: redis.command(command, *words))
            if name == "hgetall":
                return _pairs(reply)
            return (int(reply[0]), _pairs(reply[1])) if name == "hscan" else reply

        command = name.upper()
        setattr(self, name, send)
        return send

    def register_script(self, text: str) -> Callable[..., Any]:
        async def run(keys: Sequence[str] = (), args: Sequence[Any] = ()) -> Any:
            words = [str(arg) for arg in args]
            return await self._request(lambda redis: redis.script(text, list(keys), words))

        return run

    def _time_out(self, answer: asyncio.Future[Any]) -> None:
        """Let an attempt fail after the timeout. One timer does for all attempts, as they all have the same timeout."""
        loop = self._process.loop
        self._awaited.append((loop.time() + self._timeout_s, answer))
        if len(self._awaited) == 1:
            loop.call_later(self._timeout_s, self._look_at_awaited)

    def _look_at_awaited(self) -> None:
        loop, awaited = self._process.loop, self._awaited
        while awaited and (awaited[0][1].done() or awaited[0][0] <= loop.time()):
            _fail(awaited.popleft()[1], TimeoutError("Timeout reading from the store"))
        if awaited:
            loop.call_at(awaited[0][0], self._look_at_awaited)

    async def aclose(self) -> None:
        pass

    def _request(self, act: Callable[[SimulatedRedis], Any]) -> Coroutine[Any, Any, Any]:
        request = Request(self._process, act)
        return self._retry.call_with_retry(lambda: self._attempt(request), _nothing)  # type: ignore[no-any-return]

    def _attempt(self, request: Request) -> asyncio.Future[Any]:
        answer = self._process.loop.create_future()
        self._time_out(answer)
        self._server.send(request, answer)
        return answer


async def _nothing(_error: Exception) -> None:
    """What is done after an attempt that failed."""


def _pairs(words: Sequence[str]) -> dict[str, str]:
    return dict(zip(words[::2], words[1::2], strict=True))
