"""Admission of gRPC calls: the cluster token, the protocol version, and the size and form of requests.

Clients send token, version and their release as metadata of every call; servers check them before they decode anything of the
request. Peers of different releases work together as long as the protocol version is the same (docs/upgrading.md).
"""

from __future__ import annotations

import functools
import hmac
import importlib.metadata
import logging
from collections.abc import AsyncIterable, Callable
from typing import Any, NamedTuple

import grpc

from headrace.errors import HeadraceError, UnauthenticatedError, UnavailableError, UserError, status_of
from headrace.observability.logs import pairs

log = logging.getLogger(__name__)

PROTOCOL = 1
"""Version of the protocol; servers refuse clients with any other. It must rise with every change that a peer of the previous
release would misunderstand, such as a new default of a job spec field. Additions need no new version: a peer ignores fields that
it does not know."""

_TOKEN = "authorization"
_PROTOCOL = "headrace-protocol"
_RELEASE = "headrace-release"
_MOST_RELEASES = 16  # other releases that one server logs: anybody may say any
_OPEN = "/grpc.health."  # open to all: container engines probe it without a token, and it says only whether a service serves

MIB = 1 << 20
MAX_REQUEST_BYTES = 1 * MIB  # of a request, except for the methods in _MOST_BYTES
_MOST_BYTES = {
    # Of release 0.1, which puts 256 reports into a message however large: pages of 64,000 shards with paths of 200 characters, or
    # probes of 1,024 samples for each slot of 256. Later ones send some 1 MiB, or a single report: the damage in one shard.
    "/headrace.v1.Fleet/Work": 32 * MIB,
    "/headrace.v1.Jobs/Submit": 8 * MIB,  # a spec with as many sources, and as long paths, as headrace.limits allows
    "/headrace.v1.Sessions/Commit": 32 * MIB,  # names and reasons of refused samples: 150,000 in one step of one rank
    "/headrace.v1.Sessions/Relay": 32 * MIB,  # several commits
}
LARGEST_REQUEST_BYTES = max(_MOST_BYTES.values())
"""What any method takes: gRPC itself refuses more before it has arrived, as it knows one limit for all methods of a server."""

Metadata = tuple[tuple[str, str], ...]


@functools.cache
def release() -> str:
    """Return the release that this process is of, such as 0.2.0; "unknown" where Headrace is not installed."""
    try:
        return importlib.metadata.version("headrace")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def call_metadata(token: str) -> Metadata:
    """Return the metadata that a client sends with every call: protocol version, release and, unless it is empty, the token."""
    version = ((_PROTOCOL, str(PROTOCOL)), (_RELEASE, release()))
    return ((_TOKEN, f"Bearer {token}"), *version) if token else version


class _Details(NamedTuple):
    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: Any
    compression: Any


class _Introduction(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[misc]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[misc]
    grpc.StreamUnaryClientInterceptor,  # type: ignore[misc]
    grpc.StreamStreamClientInterceptor,  # type: ignore[misc]
):
    """A client interceptor that adds the token and the protocol version to the metadata of every call of a blocking channel."""

    def __init__(self, token: str) -> None:
        self._said = call_metadata(token)

    def _introduced(self, proceed: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        metadata = (*(details.metadata or ()), *self._said)
        wait, compression = getattr(details, "wait_for_ready", None), getattr(details, "compression", None)
        return proceed(_Details(details.method, details.timeout, metadata, details.credentials, wait, compression), request)

    intercept_unary_unary = intercept_unary_stream = intercept_stream_unary = intercept_stream_stream = _introduced


class _Unregistered:
    """A blocking channel that registers no methods with gRPC.

    An intercepted channel registers a method at its first call. If it was closed before, by another thread, gRPC 1.85 ends the
    process with a segmentation fault; without registration it raises ValueError.
    """

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._channel, name)
        if name not in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            return found
        return lambda method, serializer, deserializer, _: found(method, serializer, deserializer)


def with_call_metadata(channel: grpc.Channel, token: str) -> grpc.Channel:
    """Wrap a blocking channel so that every call carries the protocol version and, unless it is empty, the token."""
    return grpc.intercept_channel(_Unregistered(channel), _Introduction(token))


class Admission(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """A server interceptor that refuses calls with a wrong token, another protocol version, or a request too large or malformed.

    Calls refused for token or version are answered with an error message, and nothing of their request is decoded.
    """

    def __init__(self, token: str) -> None:
        """`token`: the cluster token that calls must carry; empty: none is required."""
        self._token = f"Bearer {token}".encode() if token else b""
        self._releases: set[str] = set()  # other than this process's own, that have called

    async def intercept_service(self, proceed: Callable[[Any], Any], details: grpc.HandlerCallDetails) -> Any:
        handler = await proceed(details)
        if handler is None or details.method.startswith(_OPEN):
            return handler
        if (refusal := self._refusal(dict(details.invocation_metadata))) is not None:
            return _refused(handler, refusal)
        return _decoding(handler, _MOST_BYTES.get(details.method, MAX_REQUEST_BYTES)) if "headrace" in details.method else handler

    def _refusal(self, metadata: dict[str, Any]) -> HeadraceError | None:
        token = str(metadata.get(_TOKEN, "")).encode(errors="replace")
        if self._token and not hmac.compare_digest(token, self._token):
            brought = "another one" if token else "none"
            return UnauthenticatedError(
                f"this service asks for the cluster's token, and the call brought {brought}: give this process the service's by "
                "HEADRACE_CLUSTER_TOKEN or HEADRACE_CLUSTER_TOKEN_FILE"
            )
        version, other = (str(metadata.get(key, default)) for key, default in ((_PROTOCOL, PROTOCOL), (_RELEASE, "")))
        if version != str(PROTOCOL):
            return UnavailableError(
                f"this service, of release {release()}, speaks version {PROTOCOL} of the protocol, and who asks, of release "
                f"{other[:20]!r}, version {version[:9]!r}: run a release that speaks the same version on both sides"
            )
        if other not in ("", release(), *self._releases) and len(self._releases) < _MOST_RELEASES:
            self._releases.add(other)
            log.warning("a peer of another release calls %s", pairs(release=other[:20], own=release()))
        return None


def _refused(handler: Any, refusal: HeadraceError) -> Any:
    """Return a handler of the same kind that aborts every call with `refusal`, and leaves requests as undecoded bytes.

    One of a stream would receive nothing, but a caller of a unary method then hears of an internal error as often as not.
    """

    async def refuse(_request: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(status_of(refusal), str(refusal))

    return _handler(handler, refuse, None)


def _decoding(handler: Any, most_bytes: int) -> Any:
    """Return the handler with a decoder that yields a UserError in place of a request that is too large or malformed.

    `raise_if_refused` raises it (`headrace.rpc.unary_method`).
    """
    decode = handler.request_deserializer

    def decoded(sent: bytes) -> Any:
        if len(sent) > most_bytes:
            return UserError(f"a request of {len(sent)} bytes is too large: this method takes {most_bytes} at most")
        try:
            return decode(sent)
        except Exception:  # each of protobuf's implementations raises its own class
            return UserError(f"a request of {len(sent)} bytes is not the message that this method takes: is the peer Headrace's?")

    act = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    return _handler(handler, act, decoded)


def _handler(like: Any, act: Callable[..., Any], decode: Callable[[bytes], Any] | None) -> Any:
    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    return kinds[like.request_streaming, like.response_streaming](act, decode, like.response_serializer)


def raise_if_refused(request: Any) -> Any:
    """Return a request, or an iterator over the messages of a stream, for a method to handle. Raises the UserError that stands in
    place of a request or message that is too large or malformed (`Admission`)."""
    if isinstance(request, AsyncIterable):
        return _Messages(request)
    if isinstance(request, UserError):
        raise request
    return request


class _Messages:
    def __init__(self, messages: AsyncIterable[Any]) -> None:
        self._messages = aiter(messages)

    def __aiter__(self) -> _Messages:
        return self

    async def __anext__(self) -> Any:
        return raise_if_refused(await anext(self._messages))
