"""gRPC as Headrace uses it: channels with retries and deadlines, servers with health and reflection, and the error mapping."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headrace.admission import LARGEST_REQUEST_BYTES, Admission, Metadata, call_metadata, raise_if_refused, with_call_metadata
from headrace.cluster_token import cluster_token, validated_token
from headrace.endpoint_form import check_endpoint as check_endpoint
from headrace.errors import EndpointError, HeadraceError, from_rpc, status_of
from headrace.handshake import tls_mismatch
from headrace.health_service import HealthService
from headrace.identity import REORDER, Identity, Papers, channel_options, identity
from headrace.leader_channel import LeaderChannel, look_up_async, unknown_hosts
from headrace.renewing_channel import RenewingChannel
from headrace.token_folder import TokenFolder

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0  # how long a service may take to answer at all: it may be starting at the same time
START_TIMEOUT_S = 600.0  # how long a service may report that it is starting: the first start compiles the planner
PROBE_AFTER_S = 0.5  # how long a service may not answer before a client looks whether TLS is the reason
QUIET_S = 3.0  # how long a client waits for a starting service before it logs that it waits
CALL_TIMEOUT_S = 10.0  # deadline of every unary call
MAX_MESSAGE_BYTES = 64 << 20  # plans and ledgers of very large batches; payload does not come this way
KEEPALIVE_MS = 2_000  # a cut connection is noticed after this time plus KEEPALIVE_TIMEOUT_MS
KEEPALIVE_TIMEOUT_MS = 3_000

JOBS = "headrace.v1.Jobs"
"""Name of the gRPC service that only reorder services have; its health status says whether they lead."""

STARTING = "headrace.starting"
"""Name under which a server's health service reports SERVING while the server runs but its own services are not ready yet."""

# Only UNAVAILABLE is retried: the request did not reach a server. All of these calls may be repeated, List as long as it has not
# answered. Other streams are not retried: only their reader knows what it has received already, and where else to ask. Nor is
# Delete, which would say of a job that it has deleted that there is none.
_RETRIED = {
    JOBS: ("Submit", "Show", "List", "Cancel", "Pause", "Reset", "SetTopology", "SetWeights", "ShowPlan"),
    "headrace.v1.Sessions": ("Open", "ReportLost", "Commit", "Close"),
}
_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{"service": s, "method": m} for s, methods in _RETRIED.items() for m in methods],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.05s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
# With several endpoints, calls go to those that report SERVING: among reorder services, to the leader.
_LEADER_CONFIG = _SERVICE_CONFIG | {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": JOBS},
}
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # default a minute, for a peer that hangs while its kernel still acks
    ("grpc.http2.max_pings_without_data", 0),
]
CHANNEL_OPTIONS = [
    *_OPTIONS,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),  # default 30 s, too long to find a service that moved
]
SERVER_OPTIONS = [
    *_OPTIONS,
    ("grpc.max_receive_message_length", LARGEST_REQUEST_BYTES),
    # A stream whose messages nobody reads yet is let send 64 KiB. With probing for the bandwidth it would soon be several MiB, of
    # each of thousands of preprocessors while the service is busy; one message that is read comes as a whole either way.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.so_reuseport", 0),  # a busy port must be an error, not a second listener that takes half of the calls
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    # All ranks of a job call at the same moment. Above 1,000 gRPC would begin to turn some of them away at random.
    ("grpc.server.max_pending_requests", 1 << 16),
    ("grpc.server.max_pending_requests_hard_limit", 1 << 17),
    ("grpc.server_max_unrequested_time_in_server", 600),  # default 30 s, after which a call that waits for its turn is cancelled
]

_T = TypeVar("_T")
_Method = TypeVar("_Method", bound=Callable[..., Any])


def channel(endpoint: str, *, token: str | None = None, tls: str | Path | None = None, server: str = REORDER) -> grpc.Channel:
    """Return a blocking channel that connects at the first call.

    `endpoint`: HOST:PORT, or those of several reorder services, separated by commas: calls go to the leader. `token`: the cluster
    token; None: the token of the environment (headrace.cluster_token); empty: none. `tls`: the folder with this process's papers
    (headrace.identity); None: that of the environment; empty: plain text. `server`: the name in the server's certificate.

    Raises EndpointError for a malformed endpoint, and UserError for an invalid token or papers.
    """
    token = cluster_token() if token is None else token and validated_token(token)
    endpoints, options = _endpoints(endpoint)
    own = identity(tls)

    def make(target: str) -> grpc.Channel:
        if own is None:
            return with_call_metadata(grpc.insecure_channel(target, options=options), token)
        secured = [*options, *channel_options(server)]

        def make_with(papers: Papers) -> grpc.Channel:
            return with_call_metadata(grpc.secure_channel(target, papers.channel_credentials(), options=secured), token)

        return RenewingChannel(own, make_with)

    return make(endpoint) if len(endpoints) == 1 else LeaderChannel(endpoints, make)


def local_channel(socket_path: Path) -> grpc.Channel:
    """Return a blocking channel to a process of this host that listens on a Unix socket, and asks for no token."""
    options = [*CHANNEL_OPTIONS, ("grpc.service_config", json.dumps(_SERVICE_CONFIG)), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.insecure_channel(f"unix:{socket_path}", options=options)


@contextlib.asynccontextmanager
async def aio_channel(endpoint: str) -> AsyncIterator[grpc.aio.Channel]:
    """Open an asyncio channel to the reorder service for the block, over TLS with the papers of now if the environment names any
    (headrace.identity); pass `metadata()` to each of its calls, which carries the cluster token.

    `endpoint`: HOST:PORT, or those of several reorder services, separated by commas: calls go to the leader. The names of several
    are resolved only once, here. Raises EndpointError for a malformed endpoint, and UserError for papers that cannot be used.
    """
    endpoints, options = _endpoints(endpoint)
    target = endpoint if len(endpoints) == 1 else await look_up_async(endpoints)
    if (own := identity()) is None:
        opening = grpc.aio.insecure_channel(target, options=options)
    else:
        credentials = own.present().channel_credentials()
        opening = grpc.aio.secure_channel(target, credentials, options=[*options, *channel_options(REORDER)])
    async with opening as opened:
        yield opened


def metadata() -> Metadata:
    """Return the metadata for calls over `aio_channel`: cluster token and protocol version. Raises UserError if the token in the
    environment is invalid."""
    return call_metadata(cluster_token())


def _endpoints(endpoint: str) -> tuple[list[str], list[tuple[str, Any]]]:
    """Split comma-separated endpoints, and return them with the options of their channel. Raises EndpointError."""
    endpoints = [check_endpoint(item) for item in endpoint.split(",")]
    config = json.dumps(_LEADER_CONFIG if len(endpoints) > 1 else _SERVICE_CONFIG)
    return endpoints, [*CHANNEL_OPTIONS, ("grpc.service_config", config)]


@contextlib.contextmanager
def translated(endpoint: str) -> Iterator[None]:
    """Turn gRPC errors of calls to `endpoint` during the block into Headrace errors (`headrace.errors.from_rpc`)."""
    try:
        yield
    except grpc.RpcError as err:
        raise from_rpc(err, endpoint) from err


def call(method: Callable[..., _T], request: Any, endpoint: str, timeout_s: float = CALL_TIMEOUT_S) -> _T:
    """Make one unary call with a deadline and return its reply. Raises the Headrace error for the gRPC status of a failure."""
    with translated(endpoint):
        return method(request, timeout=timeout_s)


def unary_method(method: _Method) -> _Method:
    """Wrap a servicer method with one reply, so that Headrace errors abort the call with their status of `headrace.errors`.

    Requests that are too large or malformed (`headrace.admission`) abort it in the same way.
    """

    @functools.wraps(method)
    async def wrapper(self: Any, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await method(self, raise_if_refused(request, context), context)
        except HeadraceError as err:
            await context.abort(status_of(err), str(err))

    return wrapper  # type: ignore[return-value]


def stream_method(method: _Method) -> _Method:
    """Wrap a servicer method that yields replies, so that Headrace errors abort the call with their status of `headrace.errors`.

    Requests that are too large or malformed (`headrace.admission`) abort it in the same way.
    """

    @functools.wraps(method)
    async def wrapper(self: Any, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            replies = method(self, raise_if_refused(request, context), context)
            async with contextlib.aclosing(replies):  # its `finally` runs at once
                async for reply in replies:
                    yield reply
        except HeadraceError as err:
            await context.abort(status_of(err), str(err))

    return wrapper  # type: ignore[return-value]


class Server:
    """An asyncio gRPC server with health checking, reflection and admission control (`headrace.admission`).

    `endpoint` is HOST:PORT with the port that it got. It serves from `start` on.
    """

    def __init__(
        self,
        listen: str,
        services: dict[str, Callable[[grpc.aio.Server], None]],
        identity: Identity | None = None,
        *,
        token: str = "",
        tokens: TokenFolder | None = None,
        calls_per_s: float = math.inf,
    ) -> None:
        """`listen`: HOST:PORT; port 0 takes a free one. `services`: full service name -> function that adds its servicer.
        `identity`: for TLS, with which clients must show certificates too; None: plain text. `token`: the cluster token, with
        which every method may be called; empty: none. `tokens`: those with roles; None: none. With any, all calls but health
        checks must carry one. `calls_per_s`: most calls of the Jobs service that are answered to one host.

        Raises EndpointError if `listen` is malformed, taken or not of this machine.
        """
        check_endpoint(listen)
        host = listen.rpartition(":")[0]
        self._server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[Admission(token, tokens, calls_per_s)])
        self._health = HealthService()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        for add in services.values():
            add(self._server)
        self._names = tuple(services)
        reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        try:
            if identity is not None:
                port = self._server.add_secure_port(listen, identity.server_credentials())
            else:
                port = self._server.add_insecure_port(listen)
        except RuntimeError as err:
            raise EndpointError(
                f"cannot listen on {listen}: the port is taken or the address is not of this machine; give --listen another "
                "HOST:PORT, port 0 takes a free one"
            ) from err
        self.endpoint = f"{host}:{port}"

    async def start(self, *, serving: bool = True, starting: bool = False) -> None:
        """Start to answer calls. `serving`: report every service as SERVING (`set_serving`). `starting`: report that the process
        is still starting (`set_starting`)."""
        await self.set_starting(starting)
        await self.set_serving(serving)
        await self._server.start()

    async def set_starting(self, starting: bool) -> None:
        """Report whether the process is still starting: clients wait longer for that than for a service that does not answer."""
        status = health_pb2.HealthCheckResponse
        await self._health.set("", status.NOT_SERVING if starting else status.SERVING)
        await self._health.set(STARTING, status.SERVING if starting else status.NOT_SERVING)

    async def set_serving(self, serving: bool) -> None:
        """Report SERVING or NOT_SERVING for every service: clients with several endpoints call only those that report SERVING."""
        status = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING, refuse new calls, and cancel calls that are still open after `grace_s` seconds."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def health_of(
    endpoint: str,
    *services: str,
    timeout_s: float = CONNECT_TIMEOUT_S,
    tls: str | Path | None = None,
    server: str = REORDER,
) -> list[int | None]:
    """Return the health status (of HealthCheckResponse) that a server reports for each of `services`; None for a service that it
    does not have, or if it does not answer.

    `services`: full names; the empty name stands for the server itself. `timeout_s`: for all of them together. `tls`, `server`:
    as for `channel`.
    """
    deadline = time.monotonic() + timeout_s
    with channel(endpoint, token="", tls=tls, server=server) as ch:
        stub = health_pb2_grpc.HealthStub(ch)
        return [_reported(stub, service, deadline - time.monotonic()) for service in services]


def _reported(stub: health_pb2_grpc.HealthStub, service: str, timeout_s: float) -> int | None:
    try:
        return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s).status)
    except grpc.RpcError:
        return None


def is_serving(endpoint: str, service: str = "", timeout_s: float = 2.0, tls: str | Path | None = None) -> bool:
    """Whether a server at `endpoint` reports SERVING for `service`, a full service name; empty: for the server itself."""
    return health_of(endpoint, service, timeout_s=timeout_s, tls=tls) == [health_pb2.HealthCheckResponse.SERVING]


def stands_by(endpoint: str, tls: str | Path | None = None) -> bool:
    """Whether a reorder service runs at `endpoint` but does not serve, because another one leads or its store is unavailable."""
    return health_of(endpoint, JOBS, tls=tls) == [health_pb2.HealthCheckResponse.NOT_SERVING]


def await_reorder_service(endpoint: str, timeout_s: float = CONNECT_TIMEOUT_S, *, tls: str | Path | None = None) -> None:
    """Wait until the reorder service at `endpoint`, or one of several separated by commas, is serving. `tls`: as for `channel`.

    Raises EndpointError after `timeout_s` without an answer, and soon where TLS keeps the service from answering. A service that
    reports that it is starting gets START_TIMEOUT_S. A wait that may be long is logged.
    """
    begin = time.monotonic()
    deadline, told, missed, probed = begin + timeout_s, False, False, False
    while not is_serving(endpoint, JOBS, tls=tls):  # not the server itself: a preprocessor may listen there
        now = time.monotonic()
        if not probed and now - begin >= PROBE_AFTER_S:
            probed = True
            if reason := tls_mismatch(endpoint, identity(tls), REORDER):
                raise EndpointError(reason)
        if now - begin < START_TIMEOUT_S and any(is_serving(one, STARTING, tls=tls) for one in endpoint.split(",")):
            deadline = time.monotonic() + timeout_s
            if not told and now - begin >= QUIET_S:
                log.warning(
                    "waiting for the reorder service at %s, which is starting: the first time it compiles the planner", endpoint
                )
                told = True
        elif not missed and now - begin >= QUIET_S and timeout_s > CONNECT_TIMEOUT_S:
            log.warning("no reorder service answers at %s yet; it is waited for, %.0f s in all", endpoint, timeout_s)
            missed = True
        elif now > deadline:
            raise EndpointError(_absence(endpoint, tls))
        time.sleep(0.1)


def _absence(endpoint: str, tls: str | Path | None) -> str:
    """Return the error message for when no reorder service serves at `endpoint`; one that stands by is asked for the reason."""
    from headrace.v1 import jobs_pb2, jobs_pb2_grpc  # a health check needs no messages

    if reason := tls_mismatch(endpoint, identity(tls), REORDER):
        return reason
    for one in (one for one in endpoint.split(",") if stands_by(one, tls)):
        with channel(one, tls=tls) as ch:
            try:
                jobs_pb2_grpc.JobsStub(ch).Show(jobs_pb2.ShowRequest(), timeout=CALL_TIMEOUT_S)
            except grpc.RpcError as err:
                if err.code() is not grpc.StatusCode.PERMISSION_DENIED:  # a preprocessor's token may not ask for jobs
                    return f"no reorder service serves at {endpoint}; {one} says: {err.details()}"
    if unknown := unknown_hosts(endpoint.split(",")):
        named = f"no host name {' or '.join(map(repr, unknown))} is known to this machine"
        return f"no reorder service answers at {endpoint}: {named}; mend its spelling, or what DNS or /etc/hosts say of it"
    return f"no reorder service answers at {endpoint}; is `headrace reorder --listen {endpoint}` running?"


def reachable_address(listen: str, peer: str) -> str:
    """Return HOST:PORT under which other machines reach a server that listens on `listen`.

    A wildcard host is replaced by the address that this machine uses towards `peer`, or, of several separated by commas, towards
    the first with a route. Raises EndpointError if there is no route.
    """
    host, _, port = listen.rpartition(":")
    if host not in ("0.0.0.0", "[::]", "::"):
        return listen
    reasons = []
    for one in peer.split(","):
        peer_host, _, peer_port = check_endpoint(one).rpartition(":")
        try:
            family, kind, _, _, address = socket.getaddrinfo(peer_host, int(peer_port), type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # picks a route; sends nothing
                return f"{probe.getsockname()[0]}:{port}"
        except OSError as err:
            reasons.append(str(err))
    raise EndpointError(f"no route to {peer}: {'; '.join(reasons)}; name an address with --advertise HOST:PORT")
