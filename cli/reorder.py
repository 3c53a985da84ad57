"""`headrace reorder`: the reorder service."""

from __future__ import annotations

import argparse

from cli.endpoint import DEFAULT_ENDPOINT
from cli.log_format import add_log_format


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument(
        "--listen",
        default=DEFAULT_ENDPOINT,
        metavar="HOST:PORT",
        help="port 0 takes a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--store",
        default="embedded:headrace-store",
        metavar="URL",
        help="redis://HOST:PORT/DB, or embedded:FOLDER for a private store on this machine (default: %(default)s)",
    )
    parser.add_argument(
        "--metrics",
        default="",
        metavar="HOST:PORT",
        help="serve Prometheus metrics there; port 0 takes a free one (default: off)",
    )
    add_log_format(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    from cli.service import run_service
    from reorder_service.server import serve

    return run_service("reorder", serve(args.listen, args.store, args.metrics), args.log_format)
