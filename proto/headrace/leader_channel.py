"""Channels to one of several endpoints: to the one that serves, wherever their names lead at the time.

gRPC looks up no list of names. So they are looked up here, when a channel is made, and again whenever nobody answers: a service
that moved to another address is found under its name. Names that lead nowhere are left out as long as they do.
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


def look_up(endpoints: Sequence[str]) -> str:
    """gRPC's target for the addresses that the endpoints, HOST:PORT each, have now."""
    return _target(endpoints, map(_found, endpoints))


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
        self._lock = threading.Lock()  # of all below
        self._target = ""
        self._channel: grpc.Channel | None = None
        self._looked_up_s = -LOOKUP_S
        self._closed = False

    def present(self) -> grpc.Channel:
        """The channel that calls go through now."""
        with self._lock:
            if self._channel is None:
                self._follow()
            return self._channel

    def look_again(self) -> None:
        """Nobody answered: perhaps the names lead elsewhere now."""
        with self._lock:
            if time.monotonic() - self._looked_up_s >= LOOKUP_S and not self._closed:
                self._follow()

    def _follow(self) -> None:
        """The caller holds the lock."""
        if self._closed:
            raise ValueError("Cannot invoke RPC on closed channel!")  # as gRPC's own say it
        target = look_up(self._endpoints)
        self._looked_up_s = time.monotonic()
        if target == self._target:
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
