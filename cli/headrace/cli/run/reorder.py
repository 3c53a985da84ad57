"""`headrace reorder`: run the reorder service."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from headrace.cli.endpoint import DEFAULT_ENDPOINT, TOKEN_HELP, add_allow_anyone, add_tls, add_token_file
from headrace.cli.log_format import add_log_format

DEFAULT_STORE = "embedded:headrace-store"
KEEP_FINISHED = "7,5000"  # a week, as long as a pipeline's logs are kept; 5,000 records of jobs take some 10 MB of the store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace reorder`."""
    parser.add_argument(
        "--listen",
        default=DEFAULT_ENDPOINT,
        metavar="HOST:PORT",
        help="port 0 takes a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--store",
        default=os.environ.get("HEADRACE_STORE", "") or DEFAULT_STORE,
        metavar="URL",
        help="redis://HOST:PORT/DB, or embedded:FOLDER for a private store on this machine "
        f"(default: $HEADRACE_STORE, which `ps` does not show with its password, or else {DEFAULT_STORE})",
    )
    parser.add_argument(
        "--metrics",
        default="",
        metavar="HOST:PORT",
        help="serve Prometheus metrics there; port 0 takes a free one (default: off)",
    )
    parser.add_argument(
        "--keep-finished",
        default=KEEP_FINISHED,
        metavar="DAYS,JOBS",
        help="drop jobs that are over, with their ledgers, so many days after their end, and the oldest of more than so many; "
        "`ever` drops none (default: %(default)s)",
    )
    add_token_file(parser, TOKEN_HELP + "; made where it is not there")
    add_tls(parser)
    add_allow_anyone(parser)
    add_log_format(parser)


def run(args: argparse.Namespace) -> int:
    """Run the reorder service until it is interrupted."""
    from headrace.cli.run.memory import usable_memory
    from headrace.cli.run.serve import run_service
    from headrace.cluster_token import TOKEN, TOKEN_FILE, check_exposure, cluster_token, make_token_file
    from headrace.identity import REORDER, server_identity
    from headrace.reorder_service.keep_finished import KeepFinished
    from headrace.reorder_service.server import serve

    if not os.environ.get(TOKEN) and (file := os.environ.get(TOKEN_FILE, "")):
        make_token_file(Path(file))
    keep, token = KeepFinished.parse(args.keep_finished), cluster_token()
    check_exposure(args.listen, token, allow_anyone=args.allow_anyone)
    identity, memory_bytes = server_identity(REORDER), usable_memory()
    serving = serve(args.listen, args.store, args.metrics, token=token, identity=identity, keep=keep, memory_bytes=memory_bytes)
    return run_service("reorder", serving, args.log_format)
