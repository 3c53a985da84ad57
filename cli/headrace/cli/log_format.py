"""The arguments that say how a process tells of itself: the format of its log, and where it serves its metrics."""

from __future__ import annotations

import argparse

from headrace.observability.logs import LOG_FORMATS


def add_log_format(parser: argparse._ActionsContainer) -> None:
    """Add `--log-format`."""
    parser.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default="",
        help="of the log on standard error (default: HEADRACE_LOG_FORMAT, or else text)",
    )


def add_metrics(parser: argparse._ActionsContainer, where: str = "") -> None:
    """Add `--metrics`. `where`: which of several processes serves where, for its help."""
    parser.add_argument(
        "--metrics",
        default="",
        metavar="HOST:PORT",
        help=f"serve Prometheus metrics there{where}; port 0 takes a free one (default: off)",
    )
