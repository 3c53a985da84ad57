"""`headrace health`: for container health checks and scripts."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("endpoint", metavar="HOST:PORT", help="a reorder service or a preprocessor")


def run(args: argparse.Namespace) -> int:
    """0 if the service reports SERVING."""
    from headrace.rpc import is_serving

    serving = is_serving(args.endpoint)
    print("serving" if serving else "not serving")
    return 0 if serving else 1
