"""`headrace health`: exit code for container health checks and scripts."""

from __future__ import annotations

import argparse

from headrace.cli.endpoint import add_tls, name_endpoint

_EPILOG = """\
exit codes: 0 it serves, 1 it does not, 2 an argument is wrong.

examples:
  headrace health
  headrace health 127.0.0.1:7100
  headrace health --ready --endpoint 10.0.0.1:7070
"""

SERVING, STANDING_BY = "serving", "standing by"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace health`."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "endpoint",
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="HOST:PORT",
        help="in place of --endpoint; one that serves is enough",
    )
    name_endpoint(parser, what="a reorder service or a preprocessor")
    parser.add_argument(
        "--ready",
        action="store_true",
        help="exit 1 also where a reorder service stands by: it is well, and another one leads or its store is away",
    )
    add_tls(parser)


def run(args: argparse.Namespace) -> int:
    """Print how each endpoint is; return 0 if one of them serves and, with --ready, does not stand by, else 1.

    Raises EndpointError if TLS keeps one from answering.
    """
    endpoints = args.endpoint.split(",")
    words = list(map(_words, endpoints))
    for endpoint, word in zip(endpoints, words, strict=True):
        print(word if len(endpoints) == 1 else f"{endpoint}: {word}")
    return 0 if SERVING in words or (STANDING_BY in words and not args.ready) else 1


def _words(endpoint: str) -> str:
    """Return how the process at one endpoint is, in words. Raises EndpointError if TLS keeps it from answering."""
    from grpc_health.v1.health_pb2 import HealthCheckResponse

    from headrace.handshake import shown_names
    from headrace.identity import PREPROCESSOR, REORDER, identity
    from headrace.rpc import JOBS, health_of

    own = identity()
    server = PREPROCESSOR if own is not None and PREPROCESSOR in shown_names(endpoint, own) else REORDER
    itself, jobs = health_of(endpoint, "", JOBS, server=server)
    serving, standing_by = itself == HealthCheckResponse.SERVING, jobs == HealthCheckResponse.NOT_SERVING
    if not serving:
        from headrace.errors import EndpointError
        from headrace.handshake import tls_mismatch

        if reason := tls_mismatch(endpoint, own, server):
            raise EndpointError(reason)
    return "not serving" if not serving else STANDING_BY if standing_by else SERVING
