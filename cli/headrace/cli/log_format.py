"""How the services write their logs, unless told otherwise."""

from __future__ import annotations

import argparse

from headrace.observability.logs import LOG_FORMATS


def add_log_format(parser: argparse.ArgumentParser) -> None:
    """The argument that says it."""
    parser.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default="",
        help="of the log on standard error (default: HEADRACE_LOG_FORMAT, or else text)",
    )
