"""`headrace preprocessor`: one preprocessor."""

from __future__ import annotations

import argparse
import os

from cli.endpoint import add_endpoint

DEFAULT_BUDGET_MIB = 512
REORDER_TIMEOUT_S = 30.0  # services may be started in any order within this time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_endpoint(parser, "--reorder", f", which may also start up to {REORDER_TIMEOUT_S:.0f} s later")
    parser.add_argument(
        "--listen",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="where trainers fetch; port 0 takes a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--advertise",
        default="",
        metavar="HOST:PORT",
        help="the address that trainers are told (default: the listening one; for 0.0.0.0 this machine's towards --reorder)",
    )
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, metavar="N", help="worker threads (default: all cores)"
    )
    parser.add_argument(
        "--budget-mib",
        type=int,
        default=DEFAULT_BUDGET_MIB,
        metavar="MIB",
        help="memory for decoded parts (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    from cli.service import run_service
    from headrace import rpc
    from headrace.errors import UserError
    from preprocessor.server import serve

    if args.threads < 1 or args.budget_mib < 1:
        raise UserError("--threads and --budget-mib must be at least 1")
    for endpoint in filter(None, (args.reorder, args.listen, args.advertise)):
        rpc.check_endpoint(endpoint)
    rpc.await_reorder_service(args.reorder, REORDER_TIMEOUT_S)
    service = serve(
        listen=args.listen,
        reorder=args.reorder,
        advertise=args.advertise,
        threads=args.threads,
        budget_bytes=args.budget_mib << 20,
    )
    return run_service("preprocessor", service)
