"""Who is let in, and with what: the cluster's token, the protocol's version, the size and the form of what is sent.

What clients say beside every call, and what servers look at before any of it is decoded.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterable, Callable
from typing import Any, NamedTuple

import grpc

from headrace.errors import HeadraceError, UnauthenticatedError, UnavailableError, UserError, status_of

PROTOCOL = 1
"""To be raised with every change that a peer of the former release would misunderstand: a field of a job's spec that has another
default, say. What is only added needs none: a peer that does not know a new field ignores it."""

_TOKEN = "authorization"
_PROTOCOL = "headrace-protocol"
_OPEN = "/grpc.health."  # asked by container engines, which have no token; it says only whether a service serves

MIB = 1 << 20
MOST_BYTES = 1 * MIB  # of a request, but for those below
_MOST_BYTES = {
    "/headrace.v1.Fleet/Work": 64 * MIB,  # probes of hundreds of samples, pages of lists of shards, hundreds at a time
    "/headrace.v1.Jobs/Submit": 8 * MIB,  # a spec of as many sources, with paths as long, as headrace.limits lets it have
    "/headrace.v1.Sessions/Commit": 64 * MIB,  # names and reasons of refused samples, in the worst case of a whole global batch
}

Metadata = tuple[tuple[str, str], ...]


def said(token: str) -> Metadata:
    """What a client says beside every call."""
    version = ((_PROTOCOL, str(PROTOCOL)),)
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
    """Says it beside every call of a blocking channel."""

    def __init__(self, token: str) -> None:
        self._said = said(token)

    def _introduced(self, proceed: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        metadata = (*(details.metadata or ()), *self._said)
        wait, compression = getattr(details, "wait_for_ready", None), getattr(details, "compression", None)
        return proceed(_Details(details.method, details.timeout, metadata, details.credentials, wait, compression), request)

    intercept_unary_unary = intercept_unary_stream = intercept_stream_unary = intercept_stream_stream = _introduced


def introduced(channel: grpc.Channel, token: str) -> grpc.Channel:
    """The channel of a client that says the token, where there is one, and its version."""
    return grpc.intercept_channel(channel, _Introduction(token))


class Admission(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """A server's. What is refused is answered with a sentence, and nothing of it is decoded."""

    def __init__(self, token: str) -> None:
        """`token`: empty: nobody is asked for one."""
        self._token = f"Bearer {token}".encode() if token else b""

    async def intercept_service(self, proceed: Callable[[Any], Any], details: grpc.HandlerCallDetails) -> Any:
        handler = await proceed(details)
        if handler is None or details.method.startswith(_OPEN):
            return handler
        if (refusal := self._refusal(dict(details.invocation_metadata))) is not None:
            return _refused(handler, refusal)
        return _decoding(handler, _MOST_BYTES.get(details.method, MOST_BYTES)) if "headrace" in details.method else handler

    def _refusal(self, metadata: dict[str, Any]) -> HeadraceError | None:
        token = str(metadata.get(_TOKEN, "")).encode(errors="replace")
        if self._token and not hmac.compare_digest(token, self._token):
            brought = "another one" if token else "none"
            return UnauthenticatedError(
                f"this service asks for the cluster's token, and the call brought {brought}: give this process the service's by "
                "HEADRACE_CLUSTER_TOKEN or HEADRACE_CLUSTER_TOKEN_FILE"
            )
        version = metadata.get(_PROTOCOL, str(PROTOCOL))
        if version != str(PROTOCOL):
            return UnavailableError(
                f"this service speaks version {PROTOCOL} of the protocol, and who asks version {str(version)[:9]!r}: "
                "run the same release on both sides"
            )
        return None


def _refused(handler: Any, refusal: HeadraceError) -> Any:
    """A handler of the same kind that only refuses; what is sent stays as bytes."""

    async def refuse(_request: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(status_of(refusal), str(refusal))

    return _handler(handler, refuse, None)


def _decoding(handler: Any, most_bytes: int) -> Any:
    """The handler, which gets a UserError for a message that is too large or no message at all (`headrace.rpc.answers`)."""
    decode = handler.request_deserializer

    def decoded(sent: bytes) -> Any:
        if len(sent) > most_bytes:
            return UserError(f"a request of {len(sent)} bytes is too large: this method takes {most_bytes} at most")
        try:
            return decode(sent)
        except Exception:  # of protobuf's several implementations each has its own
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


def accepted(request: Any) -> Any:
    """A request, or the messages of a stream, as a method is to see them. Raises UserError in the place of what was refused."""
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
        return accepted(await anext(self._messages))
