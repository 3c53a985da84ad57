"""Channels to one of several endpoints: to the one that serves, wherever their names lead at the time.

gRPC looks up no list of names. So they are looked up here, when a channel is made, and again whenever nobody answers: a service
that moved to another address is found under its name. A name that leads nowhere is left out, or where a channel knew it before,
taken for where it led then: a resolver that is away for a moment takes no working service away.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc

LOOKUP_S = 1.0  # between two lookups: many calls may fail at once

_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)

_Found = Sequence[tuple[Any, ...]]
"""As socket.getaddrinfo returns it."""


def look_up(endpoints: Sequence[str], known: dict[str, _Found] | None = None) -> str:
    """gRPC's target for the addresses that the endpoints, HOST:PORT each, have now.

    `known`: what was found before, by endpoint. It stands in for a name that leads nowhere now, and is brought up to date.
    """
    known = {} if known is None else known
    known |= {endpoint: found for endpoint in endpoints if (found := _found(endpoint))}
    return _target(endpoints, (known.get(endpoint, ()) for endpoint in endpoints))


async def look_up_async(endpoints: Sequence[str]) -> str:
    """The same, and the event loop goes on meanwhile."""
    return _target(endpoints, await asyncio.gather(*(asyncio.to_thread(_found, endpoint) for endpoint in endpoints)))


def _found(endpoint: str) -> _Found:
    host, _, port = endpoint.rpartition(":")
    try:
        return socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError:
        return ()


def _target(endpoints: Sequence[str], found: Iterable[_Found]) -> str:
    """The IPv4 addresses of all hosts; where one has only IPv6, all as IPv6, which has room for IPv4 addresses too.

    Where no name leads anywhere, the first: gRPC then says why.
    """
    by_host = [(_addresses(of_host, socket.AF_INET), _addresses(of_host, socket.AF_INET6)) for of_host in found]
    ports = [endpoint.rpartition(":")[2] for endpoint in endpoints]
    if not any(four or six for four, six in by_host):
        return endpoints[0]
    if all(four or not six for four, six in by_host):
        named = [f"{host}:{port}" for (four, _), port in zip(by_host, ports, strict=True) for host in four]
        return "ipv4:" + ",".join(dict.fromkeys(named))
    sixes = [[f"::ffff:{host}" for host in four] or six for four, six in by_host]
    named = [f"[{host}]:{port}" for hosts, port in zip(sixes, ports, strict=True) for host in hosts]
    return "ipv6:" + ",".join(dict.fromkeys(named))


def _addresses(found: _Found, family: int) -> list[str]:
    return sorted({address[0] for of_family, *_, address in found if of_family == family})


class LeaderChannel(grpc.Channel):  # type: ignore[misc]  # gRPC has no types
    """Blocking, as gRPC's own. After a call that nobody answered, calls go where the names lead then. Thread-safe."""

    def __init__(self, endpoints: Sequence[str], make: Callable[[str], grpc.Channel]) -> None:
        """`make`: a channel to a target of gRPC. The first is made at the first call."""
        self._endpoints = endpoints
        self._make = make
        self._looking = threading.Lock()  # of a look-up, which may take many seconds, and of what it knows
        self._known: dict[str, _Found] = {}
        self._looked_up_s = -LOOKUP_S
        self._lock = threading.Lock()  # of all below; nobody waits for a resolver who has a channel
        self._target = ""
        self._channel: grpc.Channel | None = None
        self._closed = False

    def present(self) -> grpc.Channel:
        """The channel that calls go through now."""
        if self._channel is None:
            with self._looking:
                if self._channel is None:
                    self._follow()
        if self._channel is None:
            raise ValueError("Cannot invoke RPC on closed channel!")  # as gRPC's own say it
        return self._channel

    def look_again(self) -> None:
        """Nobody answered: perhaps the names lead elsewhere now."""
        if not self._looking.acquire(blocking=False):
            return  # another thread finds out
        try:
            if time.monotonic() - self._looked_up_s >= LOOKUP_S:
                self._follow()
        finally:
            self._looking.release()

    def _follow(self) -> None:
        """The caller holds the lock of look-ups."""
        target = look_up(self._endpoints, self._known)
        self._looked_up_s = time.monotonic()
        with self._lock:
            if self._closed or target == self._target:
                return
            former, self._target, self._channel = self._channel, target, self._make(target)
        if former is not None:
            former.close()

    def unary_unary(self, *args: Any, **options: Any) -> Callable[..., Any]:
        def call(request: Any, **how: Any) -> Any:
            try:
                return self.present().unary_unary(*args, **options)(request, **how)
            except grpc.RpcError as err:
                if isinstance(err, grpc.Call) and err.code() in _GONE:
                    self.look_again()
                raise

        return call

    def unary_stream(self, *args: Any, **options: Any) -> Callable[..., Any]:
        return lambda *request, **how: self.present().unary_stream(*args, **options)(*request, **how)

    def stream_unary(self, *args: Any, **options: Any) -> Callable[..., Any]:
        return lambda *request, **how: self.present().stream_unary(*args, **options)(*request, **how)

    def stream_stream(self, *args: Any, **options: Any) -> Callable[..., Any]:
        return lambda *request, **how: self.present().stream_stream(*args, **options)(*request, **how)

    def subscribe(self, callback: Callable[..., Any], try_to_connect: bool = False) -> None:
        self.present().subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[..., Any]) -> None:
        self.present().unsubscribe(callback)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._channel is not None:
                self._channel.close()

    def __enter__(self) -> LeaderChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
