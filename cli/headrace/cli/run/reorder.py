"""`headrace reorder`: run the reorder service."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from headrace.cli.endpoint import DEFAULT_ENDPOINT, TOKEN_HELP, add_doors, add_tls, add_token_file
from headrace.cli.log_format import add_log_format, add_metrics

DEFAULT_STORE = "embedded:headrace-store"
DEFAULT_PAGE = "127.0.0.1:7080"
KEEP_FINISHED = "7,5000"  # a week, as long as a pipeline's logs are kept; 5,000 records of jobs take some 10 MB of the store
MAX_JOBS = 1_000  # far more than anybody trains at a time; each takes some MiB of memory, and a turn of every preprocessor
MAX_CALLS_PER_S = 1_000  # a busy `headrace top` makes some ten
_EPILOG = """\
examples:
  headrace reorder                                        for this machine
  headrace reorder --store redis://10.0.0.5:6379/0 --keep-finished 30,1000
  headrace reorder --listen 0.0.0.0:7070 --tls papers/reorder --tokens tokens
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace reorder`."""
    parser.epilog = _EPILOG
    listening = parser.add_argument_group("where it listens")
    listening.add_argument(
        "--listen",
        default=DEFAULT_ENDPOINT,
        metavar="HOST:PORT",
        help="port 0 takes a free one (default: %(default)s)",
    )
    listening.add_argument(
        "--page",
        default="",
        metavar="HOST:PORT",
        help="serve a web page there that shows jobs, steps and preprocessors; it asks for a token where the service does, and "
        f"speaks HTTPS with --tls; {DEFAULT_PAGE} is a good place, and port 0 takes a free one (default: off)",
    )
    store = parser.add_argument_group("store")
    store.add_argument(
        "--store",
        default=os.environ.get("HEADRACE_STORE", "") or DEFAULT_STORE,
        metavar="URL",
        help="redis://HOST:PORT/DB, or embedded:FOLDER for a private store on this machine "
        f"(default: $HEADRACE_STORE, which `ps` does not show with its password, or else {DEFAULT_STORE})",
    )
    store.add_argument(
        "--keep-finished",
        default=KEEP_FINISHED,
        metavar="DAYS,JOBS",
        help="drop jobs that are over, with their ledgers, so many days after their end, and the oldest of more than so many; "
        "`ever` drops none (default: %(default)s)",
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-jobs",
        type=int,
        default=MAX_JOBS,
        metavar="N",
        help="refuse to begin another job while N have not ended (default: %(default)s)",
    )
    limits.add_argument(
        "--max-calls-per-s",
        type=int,
        default=MAX_CALLS_PER_S,
        metavar="R",
        help="answer one host R calls a second about jobs at most; trainers' steps are none of them (default: %(default)s)",
    )
    doors = parser.add_argument_group("who is let in")
    add_token_file(doors, TOKEN_HELP + "; made where it is not there")
    add_tls(doors)
    add_doors(doors, "submit, train, preprocess and watch")
    telling = parser.add_argument_group("log and metrics")
    add_log_format(telling)
    add_metrics(telling)


def run(args: argparse.Namespace) -> int:
    """Run the reorder service until it is interrupted."""
    from headrace.cli.run.connection_log import connections_logged
    from headrace.cli.run.memory import usable_memory
    from headrace.cli.run.serve import run_service
    from headrace.cluster_token import TOKEN, TOKEN_FILE, check_exposure, cluster_token, make_token_file
    from headrace.errors import UserError
    from headrace.identity import REORDER, server_identity
    from headrace.reorder_service.keep_finished import KeepFinished
    from headrace.token_folder import TokenFolder

    if min(args.max_jobs, args.max_calls_per_s) < 1:
        raise UserError("--max-jobs and --max-calls-per-s must be at least 1")
    identity = server_identity(REORDER)
    if not os.environ.get(TOKEN) and (file := os.environ.get(TOKEN_FILE, "")):
        make_token_file(Path(file))
    keep, token = KeepFinished.parse(args.keep_finished), cluster_token()
    tokens = TokenFolder(args.tokens) if args.tokens else None
    for option, listen in (("--listen", args.listen), ("--page", args.page)):
        if listen:
            check_exposure(
                listen,
                option=option,
                has_token=bool(token or tokens),
                tls=identity is not None,
                allow_anyone=args.allow_anyone,
                allow_plaintext=args.allow_plaintext,
            )

    from headrace.reorder_service.server import serve  # takes seconds, which a wrong argument need not wait for

    serving = serve(
        args.listen,
        args.store,
        args.metrics,
        page_listen=args.page,
        page_for_any_host=args.allow_anyone,
        token=token,
        tokens=tokens,
        identity=identity,
        keep=keep,
        memory_bytes=usable_memory(),
        max_jobs=args.max_jobs,
        calls_per_s=args.max_calls_per_s,
    )
    with connections_logged():
        return run_service("reorder", serving, args.log_format)
