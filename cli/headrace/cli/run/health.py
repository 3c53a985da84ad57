"""`headrace health`: exit code for container health checks and scripts."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace health`."""
    parser.add_argument("endpoint", metavar="HOST:PORT", help="a reorder service or a preprocessor")
    parser.add_argument(
        "--ready",
        action="store_true",
        help="exit 1 also where a reorder service stands by: it is well, and another one leads or its store is away",
    )
    parser.add_argument(
        "--tls-ca", type=Path, metavar="FILE", help="the CA, in PEM, of a preprocessor that speaks TLS (default: it does not)"
    )


def run(args: argparse.Namespace) -> int:
    """Return 0 if the process reports SERVING and, with --ready, its Jobs service does not stand by; else 1.

    Raises EndpointError if TLS keeps it from answering.
    """
    from grpc_health.v1.health_pb2 import HealthCheckResponse

    from headrace.rpc import JOBS, health_of

    credentials, ca = None, None
    if args.tls_ca:
        import grpc

        from headrace.transport.tls import load_ca

        credentials = grpc.ssl_channel_credentials(ca := load_ca(args.tls_ca))
    itself, jobs = health_of(args.endpoint, "", JOBS, credentials=credentials)
    serving, standing_by = itself == HealthCheckResponse.SERVING, jobs == HealthCheckResponse.NOT_SERVING
    if not serving:
        from headrace.errors import EndpointError
        from headrace.transport.tls import tls_mismatch

        if reason := tls_mismatch(args.endpoint, ca):
            raise EndpointError(reason)
    print("not serving" if not serving else "standing by" if standing_by else "serving")
    return 0 if serving and not (standing_by and args.ready) else 1
