"""`headrace certs`: certificates for mutual TLS, from an authority of one's own."""

from __future__ import annotations

import argparse
from pathlib import Path

DEFAULT_DAYS = 90
MOST_DAYS = 3650
_EPILOG = """\
examples:
  headrace certs papers
  headrace certs papers --days 30 --renew
  headrace certs papers --store-host redis.example.org
  headrace reorder --tls papers/reorder
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace certs`."""
    parser.epilog = _EPILOG
    parser.description = (
        "Make an authority in DIR/authority where there is none, and by it the papers of each kind of process: DIR/reorder, "
        "DIR/preprocessor, DIR/trainer and DIR/client are what their --tls names. Run again, it renews those that have used two "
        "thirds of their time, and processes take up the new files without a restart. DIR/authority/ca.key makes papers for "
        "anybody: no process needs it. A Redis server of your own gets papers in DIR/store by --store-host."
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="where the folders are made")
    parser.add_argument(
        "--days", type=int, default=DEFAULT_DAYS, metavar="N", help="how long new certificates are valid (default: %(default)s)"
    )
    parser.add_argument(
        "--store-host",
        action="append",
        default=[],
        metavar="HOST",
        help="make papers of a Redis server, too, that rediss://HOST names; several times for several names of it "
        "(default: those that its papers have, if there are some)",
    )
    parser.add_argument("--renew", action="store_true", help="renew all certificates, whatever time they have left")


def run(args: argparse.Namespace) -> int:
    """Make what is missing or used, and print a line for each folder."""
    from headrace.errors import UserError

    if not 1 <= args.days <= MOST_DAYS:
        raise UserError(f"--days must be from 1 to {MOST_DAYS}, got {args.days}")
    from headrace.cli.run.authority import make_papers

    for made in make_papers(args.folder, args.days, renew=args.renew, store_hosts=args.store_host):
        print(f"{'made' if made.is_new else 'kept'} {made.folder}, valid until {made.until:%Y-%m-%d %H:%M} UTC")
    return 0
