"""Admission of gRPC calls: tokens and their roles, the protocol version, the rate of calls, and the size and form of requests.

Clients send token, version and their release as metadata of every call; servers check them before they decode anything of the
request, and log what they refuse (headrace.refusals). Peers of different releases work together as long as the protocol version
is the same (docs/upgrading.md).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import inspect
import logging
import math
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc

from headrace.call_rate import CallRate, host_of
from headrace.errors import HeadraceError, LimitError, RoleError, UnauthenticatedError, UnavailableError, UserError, status_of
from headrace.known_tokens import KnownTokens
from headrace.observability.logs import pairs
from headrace.refusals import MOST_RELEASE, RELEASE, Reason, Refusals
from headrace.roles import Role, may_call, role_names, role_of
from headrace.token_folder import TokenFolder

log = logging.getLogger(__name__)

PROTOCOL = 1
"""Version of the protocol; servers refuse clients with any other. It must rise with every change that a peer of the previous
release would misunderstand, such as a new default of a job spec field. Additions need no new version: a peer ignores fields that
it does not know."""

_TOKEN = "authorization"
_PROTOCOL = "headrace-protocol"
_MOST_RELEASES = 16  # other releases that one server logs: anybody may say any
_SCHEME = "Bearer "
_RATED = "/headrace.v1.Jobs/"  # for people and tools; what trainers and preprocessors say has the rate of the work
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
"""What any method takes: gRPC itself ends a call with more before it has arrived, as it knows one limit for all methods of a
server, and says so to the caller alone."""

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
    version = ((_PROTOCOL, str(PROTOCOL)), (RELEASE, release()))
    return ((_TOKEN, f"{_SCHEME}{token}"), *version) if token else version


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
    """A server interceptor that refuses calls with a wrong token, another protocol version, or a request too large or malformed,
    and those of a peer that calls too often.

    Calls refused for token, role, version or rate are answered with an error message, and nothing of their request is decoded.
    """

    def __init__(self, token: str, folder: TokenFolder | None = None, calls_per_s: float = math.inf) -> None:
        """`token`: the cluster token; empty: there is none. `folder`: tokens with roles; None: there are none. Without both,
        every call is let in. `calls_per_s`: of the Jobs service, for each host that calls.
        """
        self._own = KnownTokens.of([(token, Role.CLUSTER)] if token else [])
        self._folder = folder
        self._rate = CallRate(calls_per_s)
        self._refusals = Refusals()
        self._releases: set[str] = set()  # other than this process's own, that have called

    async def intercept_service(self, proceed: Callable[[Any], Any], details: grpc.HandlerCallDetails) -> Any:
        handler = await proceed(details)
        method = details.method
        if handler is None or method.startswith(_OPEN):
            return handler
        if (refusal := self._refusal(dict(details.invocation_metadata), method)) is not None:
            refused = _refused(handler, refusal, functools.partial(self._refusals.note, refusal.reason, method, **refusal.more))
            return _arrived(refused, method, self._refusals) if method.startswith(_RATED) else refused
        if "headrace" not in method:
            return handler
        admitted = _decoding(handler, _MOST_BYTES.get(method, MAX_REQUEST_BYTES), method, self._refusals)
        if not method.startswith(_RATED):
            return admitted
        return _arrived(self._rated(admitted, method) if math.isfinite(self._rate.per_s) else admitted, method, self._refusals)

    def _refusal(self, metadata: dict[str, Any], method: str) -> _Refusal | None:
        if (self._own or self._folder) and (refusal := self._token_refusal(str(metadata.get(_TOKEN, "")), method)) is not None:
            return refusal
        version, other = (str(metadata.get(key, default)) for key, default in ((_PROTOCOL, PROTOCOL), (RELEASE, "")))
        if version != str(PROTOCOL):
            return _Refusal(
                Reason.PROTOCOL,
                UnavailableError(
                    f"this service, of release {release()}, speaks version {PROTOCOL} of the protocol, and who asks, of release "
                    f"{other[:MOST_RELEASE]!r}, version {version[:9]!r}: run a release that speaks the same version on both sides"
                ),
                {"version": version[:9]},
            )
        if other not in ("", release(), *self._releases) and len(self._releases) < _MOST_RELEASES:
            self._releases.add(other)
            log.warning("a peer of another release calls %s", pairs(release=other[:MOST_RELEASE], own=release()))
        return None

    def _token_refusal(self, said: str, method: str) -> _Refusal | None:
        token = said.removeprefix(_SCHEME) if said.startswith(_SCHEME) else ""
        if not (roles := self._roles_of(token)):
            asked, whose = ("a role's", "one of its --tokens") if self._folder else ("the cluster's", "the service's")
            return _Refusal(
                Reason.UNKNOWN_TOKEN if said else Reason.NO_TOKEN,
                UnauthenticatedError(
                    f"this service asks for {asked} token, and the call brought {'another one' if said else 'none'}: give this "
                    f"process {whose} by HEADRACE_CLUSTER_TOKEN or HEADRACE_CLUSTER_TOKEN_FILE"
                ),
            )
        if may_call(roles, method):
            return None
        has, takes, name = role_names(roles), role_of(method), method.rpartition(".")[2]
        return _Refusal(
            Reason.ROLE,
            RoleError(
                f"{name} takes the role {takes}, and the call's token has {has}: give this process a token of the file `{takes}` "
                "by HEADRACE_CLUSTER_TOKEN or HEADRACE_CLUSTER_TOKEN_FILE"
            ),
            {"has": has, "takes": takes.value},
        )

    def _roles_of(self, token: str) -> Set[Role]:
        return self._own.roles_of(token) | (self._folder.tokens.roles_of(token) if self._folder else frozenset())

    def _rated(self, handler: Any, method: str) -> Any:
        """Return a handler, of a method with one request, that decodes and acts only while the peer does not call too often."""
        decode, serve = handler.request_deserializer, handler.unary_stream or handler.unary_unary

        async def check(context: grpc.aio.ServicerContext) -> None:
            if not self._rate.take(host_of(context.peer()), time.monotonic()):
                self._refusals.note(Reason.TOO_MANY_CALLS, method, context)
                await _abort(
                    context,
                    LimitError(
                        f"this service answers {self._rate.per_s:g} calls a second of one host about jobs, and yours makes more: "
                        "wait a second, ask less often, or raise the service's --max-calls-per-s"
                    ),
                )

        async def reply(request: bytes, context: grpc.aio.ServicerContext) -> Any:
            await check(context)
            return await serve(decode(request), context)

        async def replies(request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            await check(context)
            async with contextlib.aclosing(serve(decode(request), context)) as found:
                async for one in found:
                    yield one

        return _handler(handler, replies if handler.response_streaming else reply, None)


class _Refusal(NamedTuple):
    reason: Reason
    error: HeadraceError
    more: dict[str, object] = {}  # noqa: RUF012
    """Further fields of the line in the log."""


def _refused(handler: Any, refusal: _Refusal, note: Callable[[Any], None]) -> Any:
    """Return a handler of the same kind that notes every call and aborts it with `refusal`, and leaves requests as undecoded
    bytes.

    One of a stream would receive nothing, but a caller of a unary method then hears of an internal error as often as not.
    """

    async def refuse(_request: Any, context: grpc.aio.ServicerContext) -> None:
        note(context)
        await _abort(context, refusal.error)

    return _handler(handler, refuse, None)


async def _abort(context: grpc.aio.ServicerContext, error: HeadraceError) -> None:
    await context.abort(status_of(error), str(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class _NoRequest:
    """What a method is given in place of a request that is too large or malformed."""

    error: UserError
    note: Callable[[Any], None]


def _decoding(handler: Any, most_bytes: int, method: str, refusals: Refusals) -> Any:
    """Return the handler with a decoder that yields a _NoRequest in place of a request that is too large or malformed.

    `raise_if_refused` raises its error (`headrace.rpc.unary_method`).
    """
    decode = handler.request_deserializer

    def refused(reason: Reason, sentence: str) -> _NoRequest:
        return _NoRequest(error=UserError(sentence), note=functools.partial(refusals.note, reason, method))

    def decoded(sent: bytes) -> Any:
        size = f"a request of {len(sent)} bytes"
        if len(sent) > most_bytes:
            return refused(Reason.TOO_LARGE, f"{size} is too large: this method takes {most_bytes} at most")
        try:
            return decode(sent)
        except Exception:  # each of protobuf's implementations raises its own class
            return refused(Reason.MALFORMED, f"{size} is not the message that this method takes: is the peer Headrace's?")

    act = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    return _handler(handler, act, decoded)


def _arrived(handler: Any, method: str, refusals: Refusals) -> Any:
    """Return the handler of a method with one request as one of a stream, of which the first message is the request: alike on the
    wire, but called before it has come, and so able to note the peer of a request that gRPC does not let through."""
    serve, most = handler.unary_stream or handler.unary_unary, LARGEST_REQUEST_BYTES

    async def arriving(requests: AsyncIterable[Any], context: grpc.aio.ServicerContext) -> Any:
        peer = context.peer()  # empty once gRPC has ended the call
        async for request in requests:
            return request
        refusals.note(Reason.NOT_WHOLE, method, context, peer=peer, at_most_bytes=most)
        sentence = f"a request is cut off, or larger than the {most} bytes that this service takes"
        return await _abort(context, UserError(sentence))  # never returns

    async def reply(requests: AsyncIterable[Any], context: grpc.aio.ServicerContext) -> Any:
        return await serve(await arriving(requests, context), context)

    async def replies(requests: AsyncIterable[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        served = serve(await arriving(requests, context), context)
        if inspect.iscoroutine(served):
            await served
            return
        async with contextlib.aclosing(served) as found:
            async for one in found:
                yield one

    if handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(replies, handler.request_deserializer, handler.response_serializer)
    return grpc.stream_unary_rpc_method_handler(reply, handler.request_deserializer, handler.response_serializer)


def _handler(like: Any, act: Callable[..., Any], decode: Callable[[bytes], Any] | None) -> Any:
    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    return kinds[like.request_streaming, like.response_streaming](act, decode, like.response_serializer)


def raise_if_refused(request: Any, context: grpc.aio.ServicerContext) -> Any:
    """Return a request, or an iterator over the messages of a stream, for a method to handle.

    Raises the UserError of a request or message that is too large or malformed, and notes it (`Admission`).
    """
    if isinstance(request, AsyncIterable):
        return _Messages(request, context)
    if isinstance(request, _NoRequest):
        request.note(context)
        raise request.error
    return request


class _Messages:
    def __init__(self, messages: AsyncIterable[Any], context: grpc.aio.ServicerContext) -> None:
        self._messages = aiter(messages)
        self._context = context

    def __aiter__(self) -> _Messages:
        return self

    async def __anext__(self) -> Any:
        return raise_if_refused(await anext(self._messages), self._context)
