"""A channel over TLS that shows each new call's server the papers of that moment."""

from __future__ import annotations

import threading
from collections.abc import Callable

import grpc

from headrace.identity import Identity, Papers
from headrace.replaced_channel import ReplacedChannel


class RenewingChannel(ReplacedChannel):
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

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for channel in filter(None, (self._former, self._channel)):
                channel.close()
