"""A rank's connection to one preprocessor, and the choice of its transport."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from headrace import rpc
from headrace.errors import EndpointError, UnavailableError, UserError
from headrace.handshake import tls_mismatch
from headrace.identity import PREPROCESSOR, identity
from headrace.observability.logs import pairs
from headrace.ticket import part_of
from headrace.transport.base import FLIGHT, SHARED_MEMORY, TRANSPORTS, UCX, Delivery, Receiver, TransportError
from headrace.transport.flight import FlightReceiver
from headrace.transport.slots import SlotReceiver
from headrace.transport.ucx import UcxClient
from headrace.v1 import payload_pb2, payload_pb2_grpc

log = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 120.0  # long, as the part may still be decoded; a dead preprocessor is noticed by its connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Options common to all of a trainer's connections to preprocessors."""

    transports: frozenset[str]
    """The transports allowed, some of headrace.transport.base.TRANSPORTS."""
    columns: tuple[str, ...] = ()
    """Columns to fetch; empty: all of them."""
    token: str | None = None
    """The cluster's token. None: the environment's."""
    tls: str | Path | None = None
    """The folder with this process's papers (headrace.identity). None: the environment's; empty: plain text."""
    ucx: UcxClient = field(default_factory=UcxClient)
    """Thread and buffers shared by all UCX connections; whoever creates the Terms must close it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peer:
    """A preprocessor, the transports that it offers, and the trainer's options for the connection."""

    endpoint: str
    offer: payload_pb2.OfferReply
    terms: Terms


def _shared_memory(peer: _Peer) -> Receiver:
    if not peer.offer.arena:
        raise TransportError("the preprocessor has no shared memory")
    return SlotReceiver(peer.offer.arena)


def _ucx(peer: _Peer) -> Receiver:
    if not peer.offer.ucx_port:
        raise TransportError("the preprocessor does not offer it")
    if identity(peer.terms.tls) is not None:
        raise TransportError("it does not encrypt, as TLS does")
    host = peer.endpoint.rpartition(":")[0]
    return peer.terms.ucx.connect(host, peer.offer.ucx_port, peer.offer.ucx_token, peer.terms.columns)


def _flight(peer: _Peer) -> Receiver:
    host = peer.endpoint.rpartition(":")[0]
    own = identity(peer.terms.tls)
    papers = own.present() if own is not None else None
    return FlightReceiver(f"{host}:{peer.offer.flight_port}", columns=peer.terms.columns, papers=papers)


_RECEIVERS: dict[str, Callable[[_Peer], Receiver]] = {SHARED_MEMORY: _shared_memory, UCX: _ucx, FLIGHT: _flight}
"""Functions that open each transport. They raise TransportError where it is not possible with that preprocessor."""


class Connection:
    """A connection to one preprocessor, over the best transport that both sides support. Thread-safe."""

    def __init__(self, endpoint: str, terms: Terms) -> None:
        self.endpoint = endpoint
        self._terms = terms
        self._channel = rpc.channel(endpoint, token=terms.token, tls=terms.tls, server=PREPROCESSOR)
        self._stub = payload_pb2_grpc.PayloadStub(self._channel)
        self._lock = threading.Lock()  # guards everything below
        self._peer: _Peer | None = None
        self._order: tuple[str, ...] = ()
        """Transports to try in turn for a part: the chosen one, then Flight if that one has no room. Empty: none chosen yet."""
        self._receivers: dict[str, Receiver] = {}
        self._closed = False

    def fetch(self, ticket: str) -> Delivery:
        """Fetch a part by the chosen transport, or by Flight if that one fails or has no room for it.

        Raises the errors of `Receiver.fetch` except TransportError, and UserError where none of the allowed transports is
        possible with this preprocessor.
        """
        for transport in self._choose():
            receiver = self._receiver(transport)
            try:
                if (delivery := receiver.fetch(ticket, FETCH_TIMEOUT_S)) is not None:
                    return delivery
            except TransportError as err:  # the preprocessor may have died or restarted: the next fetch asks for its offer
                log.warning("transport is lost %s", pairs(endpoint=self.endpoint, transport=transport, reason=err))
                self._lose(transport, receiver)
        raise UnavailableError(f"no transport brought part {part_of(ticket)} of {self.endpoint}")

    def close(self) -> None:
        """Close the channel and all transports; pending calls fail."""
        self._channel.close()
        with self._lock:
            self._closed = True
            for receiver in self._receivers.values():
                receiver.close()

    def _choose(self) -> tuple[str, ...]:
        with self._lock:
            if self._order:
                return self._order
            self._peer = _Peer(endpoint=self.endpoint, offer=self._ask(), terms=self._terms)
            reasons: list[str] = []
            for transport in (name for name in TRANSPORTS if name in self._terms.transports):
                try:
                    self._open(transport)
                except TransportError as err:
                    reasons.append(f"{transport}: {err}")
                    continue
                why = {"reason": "; ".join(reasons)} if reasons else {}
                log.info("receiving %s", pairs(endpoint=self.endpoint, transport=transport, **why))
                self._order = tuple(dict.fromkeys((transport, FLIGHT)))
                return self._order
        raise UserError(
            f"none of the transports asked for is possible with {self.endpoint} ({'; '.join(reasons)}): "
            f"share /dev/shm between preprocessor and trainer, or allow {FLIGHT}"
        )

    def _ask(self) -> payload_pb2.OfferReply:
        try:
            offer: payload_pb2.OfferReply = rpc.call(self._stub.Offer, payload_pb2.OfferRequest(), self.endpoint)
        except ValueError as err:  # gRPC raises it for a call on a channel that is closed: another thread found it broken
            raise UnavailableError(f"the connection to {self.endpoint} was closed") from err
        except UnavailableError as err:
            if reason := tls_mismatch(self.endpoint, identity(self._terms.tls), PREPROCESSOR):
                raise EndpointError(reason) from err
            raise
        return offer

    def _receiver(self, transport: str) -> Receiver:
        with self._lock:
            return self._open(transport)

    def _open(self, transport: str) -> Receiver:
        """Return the receiver of a transport, opened at its first use. Raises TransportError. The caller holds the lock."""
        if self._closed or self._peer is None:
            raise UnavailableError(f"the connection to {self.endpoint} was closed")
        if transport not in self._receivers:
            self._receivers[transport] = _RECEIVERS[transport](self._peer)
        return self._receivers[transport]

    def _lose(self, transport: str, receiver: Receiver) -> None:
        with self._lock:
            if self._receivers.get(transport) is receiver:
                del self._receivers[transport]
                self._order = ()
        receiver.close()
