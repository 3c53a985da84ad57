"""Whether a reorder service can be reached and talked to, and if not, at which step it fails: name, port, TLS, health, token."""

from __future__ import annotations

import socket
from datetime import datetime, timedelta

import grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse

from headrace import rpc
from headrace.cli.doctor.diagnosis import Diagnosis, State, fault, from_sentence, ok, warning
from headrace.cluster_token import cluster_token
from headrace.errors import HeadraceError, RoleError, UnauthenticatedError, UserError
from headrace.handshake import shown_until, tls_mismatch
from headrace.identity import CHAIN, REORDER, Identity, identity

CONNECT_TIMEOUT_S = 3.0
SOON = timedelta(days=14)  # before a certificate runs out: `headrace certs` renews it when a third of its 90 days is left


def own_papers(now: datetime) -> tuple[Identity | None, list[Diagnosis]]:
    """Return this process's papers, None without any, and what is wrong with them or their token. `now`: in UTC."""
    found = []
    try:
        cluster_token()
    except UserError as err:
        found.append(from_sentence("token", str(err)))
    try:
        own = identity()
    except UserError as err:
        return None, [*found, from_sentence("own papers", str(err))]
    if own is not None:
        papers = own.present()
        found.append(
            _age("own papers", f"{papers.folder / CHAIN}, of {', '.join(papers.names) or 'no name'},", papers.until, now)
        )
    return own, found


def _age(check: str, whose: str, until: datetime, now: datetime) -> Diagnosis:
    when = f"{whose} runs out at {until:%Y-%m-%d %H:%M} UTC"
    if until - now < SOON:
        return warning(
            check, f"{when}, in {_span(until - now)}", "renew it, for example with `headrace certs`; no restart is needed"
        )
    return ok(check, when)


def _span(left: timedelta) -> str:
    hours = max(0, int(left.total_seconds() // 3600))
    return f"{hours} hours" if hours < 48 else f"{hours // 24} days"


def reach(one: str, own: Identity | None, now: datetime, *, alone: bool) -> tuple[bool, list[Diagnosis]]:
    """Return whether a reorder service at HOST:PORT leads, and what was found on the way to it.

    `own`: the papers to show; None: plain text. `now`: in UTC. `alone`: it is the only endpoint named, so one that stands by is
    no help.
    """
    trouble = _unreachable(one)
    if trouble is not None:
        return False, [trouble]
    found = [ok(one, "takes connections")]
    if reason := tls_mismatch(one, own, REORDER):
        return False, [*found, from_sentence("TLS", reason)]
    if own is None:
        found.append(ok("TLS", f"none: {one} speaks plain text"))
    elif (until := shown_until(one, own)) is not None:
        found.append(_age("TLS", f"the certificate of {one}", until, now))
    itself, jobs, starting = rpc.health_of(one, "", rpc.JOBS, rpc.STARTING)
    serving = HealthCheckResponse.SERVING
    if starting == serving:
        found.append(
            warning("service", f"{one} is starting: it compiles its planner, once, or loads it", "try again in a minute")
        )
    elif itself is None:
        name = "name that of `headrace reorder --listen` with --endpoint, and look at its log"
        found.append(fault("service", f"what listens at {one} is no service of Headrace, or hangs", name))
    elif jobs is None:
        name = "name the address of `headrace reorder --listen` with --endpoint"
        found.append(fault("service", f"{one} is a preprocessor, not the reorder service", name))
    elif jobs == serving:
        return True, [*found, ok("service", f"{one} serves")]
    elif alone:
        found.append(
            from_sentence("service", f"{_absence(one)}: name all reorder services with --endpoint, or the one that leads")
        )
    else:
        found.append(ok("service", f"{one} stands by"))
    return False, found


def _unreachable(one: str) -> Diagnosis | None:
    """Return why no connection to HOST:PORT is made; None if one is."""
    host, _, port = rpc.check_endpoint(one).rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (socket.gaierror, UnicodeError) as err:  # the second of a name that cannot be one
        name = "check the name in --endpoint, and this machine's DNS; an address does as well"
        return fault(one, f"the name {host} is not known here ({getattr(err, 'strerror', err)})", name)
    except ConnectionRefusedError:
        start = f"start the service there (`headrace reorder --listen {one}`), or name its port with --endpoint"
        return fault(one, "nothing listens there: the connection is refused", start)
    except TimeoutError:
        look = "see whether the host is up, and whether a firewall or network policy drops what is sent there"
        return fault(one, f"no answer within {CONNECT_TIMEOUT_S:.0f} s", look)
    except OSError as err:
        return fault(one, f"cannot be reached ({err.strerror or err})", "check the address, and the route from this machine")
    return None


def _absence(one: str) -> str:
    """Return what a service that does not lead says for itself."""
    from headrace.v1 import jobs_pb2, jobs_pb2_grpc

    with rpc.channel(one) as channel:
        try:
            jobs_pb2_grpc.JobsStub(channel).Show(jobs_pb2.ShowRequest(), timeout=rpc.CALL_TIMEOUT_S)
        except grpc.RpcError as err:
            if err.code() is grpc.StatusCode.UNAVAILABLE:
                return str(err.details())
    return f"{one} stands by, or has just begun to lead"


def refusal(error: HeadraceError) -> Diagnosis:
    """Return what the error of the first call says: a token that is not known or of another role, another protocol."""
    if isinstance(error, RoleError):
        return from_sentence("token", str(error), State.WARNING)  # a preprocessor's, for example, which is good for its work
    if isinstance(error, UnauthenticatedError):
        return from_sentence("token", str(error))
    details = error.__cause__.details() if isinstance(error.__cause__, grpc.Call) else None
    return from_sentence("service", details or str(error))


def admitted() -> Diagnosis:
    """Return that the service has answered a call."""
    return ok("token", "the service takes ours" if cluster_token() else "none, and the service lets us in")
