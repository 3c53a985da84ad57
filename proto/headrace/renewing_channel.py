"""A channel over TLS that shows each new call's server the papers of that moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc

from headrace.identity import Identity, Papers


class RenewingChannel(grpc.Channel):  # type: ignore[misc]  # gRPC has no types
    """A blocking gRPC channel that is replaced by one with the new papers as soon as the identity's have changed. Thread-safe.

    Calls under way stay on the former channel, which is closed at the next change.
    """

    def __init__(self, identity: Identity, make: Callable[[Papers], grpc.Channel]) -> None:
        """`make(papers)` returns a channel that shows these papers."""
        self._identity = identity
        self._make = make
        self._lock = threading.Lock()  # guards all below
        self._papers = identity.present()
        self._channel = make(self._papers)
        self._former: grpc.Channel | None = None
        self._closed = False

    def present(self) -> grpc.Channel:
        """Return the channel for calls that begin now."""
        ended = None
        with self._lock:
            papers = self._identity.present()  # in here: no thread comes later with former ones
            if papers is not self._papers and not self._closed:
                ended, self._former, self._channel = self._former, self._channel, self._make(papers)
                self._papers = papers
            present = self._channel
        if ended is not None:
            ended.close()
        return present

    def unary_unary(self, *args: Any, **options: Any) -> Callable[..., Any]:
        return lambda *request, **how: self.present().unary_unary(*args, **options)(*request, **how)

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
            for channel in filter(None, (self._former, self._channel)):
                channel.close()

    def __enter__(self) -> RenewingChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
