"""Channels to several endpoints whose calls go to the one that serves, even after it moves to another address.

gRPC cannot resolve a list of names. So the names are resolved here, when a channel is made and again whenever nobody answers: a
service that moved to another address is found under its name. A name that does not resolve is left out, or, if the channel has
resolved it before, keeps its last addresses: a short failure of the resolver does not cut off a working service.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc

from headrace.replaced_channel import ReplacedChannel

LOOKUP_S = 1.0  # least time between two lookups, as many calls may fail at once

_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)

_Found = Sequence[tuple[Any, ...]]
"""The addresses of one host, as socket.getaddrinfo returns them; empty if its name did not resolve."""


def look_up(endpoints: Sequence[str], known: dict[str, _Found] | None = None) -> str:
    """Return the gRPC target for all addresses to which `endpoints`, each HOST:PORT, resolve now.

    `known`: earlier results by endpoint. They stand in for names that do not resolve now, and are updated in place.
    """
    known = {} if known is None else known
    known |= {endpoint: found for endpoint in endpoints if (found := _found(endpoint))}
    return _target(endpoints, (known.get(endpoint, ()) for endpoint in endpoints))


async def look_up_async(endpoints: Sequence[str]) -> str:
    """Return the gRPC target for all addresses to which `endpoints`, each HOST:PORT, resolve now, without blocking the loop."""
    return _target(endpoints, await asyncio.gather(*(asyncio.to_thread(_found, endpoint) for endpoint in endpoints)))


def unknown_hosts(endpoints: Sequence[str]) -> list[str]:
    """Return the hosts of `endpoints`, each HOST:PORT, whose names do not resolve now."""
    return [endpoint.rpartition(":")[0] for endpoint in endpoints if not _found(endpoint)]


def _found(endpoint: str) -> _Found:
    host, _, port = endpoint.rpartition(":")
    try:
        return socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError:
        return ()


def _target(endpoints: Sequence[str], found: Iterable[_Found]) -> str:
    """Return a gRPC target of the IPv4 addresses of all hosts, or, if one has only IPv6, of IPv6 addresses (IPv4-mapped for hosts
    with IPv4). If no name resolves, it is the first endpoint, so that gRPC reports why.
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


class LeaderChannel(ReplacedChannel):
    """A blocking gRPC channel to several endpoints, which resolves their names again after a call that nobody answered.

    Thread-safe. Only unary-unary calls trigger the new look-up.
    """

    def __init__(self, endpoints: Sequence[str], make: Callable[[str], grpc.Channel]) -> None:
        """`make(target)` returns a channel to a gRPC target. It is called at the first call, and when the target has changed."""
        self._endpoints = endpoints
        self._make = make
        self._looking = threading.Lock()  # held during a look-up, which may take many seconds; guards _known and _looked_up_s
        self._known: dict[str, _Found] = {}
        self._looked_up_s = -LOOKUP_S
        self._lock = threading.Lock()  # guards all below; held only briefly, so calls need not wait for a look-up
        self._target = ""
        self._channel: grpc.Channel | None = None
        self._closed = False

    def present(self) -> grpc.Channel:
        """Return the channel that calls go through now. Raises ValueError if this one was closed before its first call."""
        if self._channel is None:
            with self._looking:
                if self._channel is None:
                    self._follow()
        if self._channel is None:
            raise ValueError("Cannot invoke RPC on closed channel!")  # the message of gRPC's own channels
        return self._channel

    def look_again(self) -> None:
        """Resolve the endpoints again, at most once every LOOKUP_S, and switch to a new channel if their addresses have changed.

        Called after a call that nobody answered. Returns at once if another thread is at it.
        """
        if not self._looking.acquire(blocking=False):
            return
        try:
            if time.monotonic() - self._looked_up_s >= LOOKUP_S:
                self._follow()
        finally:
            self._looking.release()

    def _follow(self) -> None:
        """Resolve the endpoints, and replace the channel if their addresses have changed. The caller holds `_looking`."""
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

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._channel is not None:
                self._channel.close()
