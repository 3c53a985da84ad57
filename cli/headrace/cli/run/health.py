"""`headrace health`: exit code for container health checks and scripts."""

from __future__ import annotations

import argparse

from headrace.cli.endpoint import add_tls


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace health`."""
    parser.add_argument("endpoint", metavar="HOST:PORT", help="a reorder service or a preprocessor")
    parser.add_argument(
        "--ready",
        action="store_true",
        help="exit 1 also where a reorder service stands by: it is well, and another one leads or its store is away",
    )
    add_tls(parser)


def run(args: argparse.Namespace) -> int:
    """Return 0 if the process reports SERVING and, with --ready, its Jobs service does not stand by; else 1.

    Raises EndpointError if TLS keeps it from answering.
    """
    from grpc_health.v1.health_pb2 import HealthCheckResponse

    from headrace.handshake import shown_names
    from headrace.identity import PREPROCESSOR, REORDER, identity
    from headrace.rpc import JOBS, health_of

    own = identity()
    server = PREPROCESSOR if own is not None and PREPROCESSOR in shown_names(args.endpoint, own) else REORDER
    itself, jobs = health_of(args.endpoint, "", JOBS, server=server)
    serving, standing_by = itself == HealthCheckResponse.SERVING, jobs == HealthCheckResponse.NOT_SERVING
    if not serving:
        from headrace.errors import EndpointError
        from headrace.handshake import tls_mismatch

        if reason := tls_mismatch(args.endpoint, own, server):
            raise EndpointError(reason)
    print("not serving" if not serving else "standing by" if standing_by else "serving")
    return 0 if serving and not (standing_by and args.ready) else 1
