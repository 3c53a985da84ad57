"""Where the commands look for the reorder service, and where it listens, unless told otherwise."""

from __future__ import annotations

import argparse

DEFAULT_ENDPOINT = "127.0.0.1:7070"


def add_endpoint(parser: argparse.ArgumentParser, flag: str = "--endpoint", note: str = "") -> None:
    """The argument that names the reorder service."""
    help_text = f"the reorder service{note}; several on one store: HOST:PORT,HOST:PORT (default: %(default)s)"
    parser.add_argument(flag, default=DEFAULT_ENDPOINT, metavar="HOST:PORT", help=help_text)
