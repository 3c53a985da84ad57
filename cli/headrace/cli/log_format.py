"""The argument that sets the format of a service's log."""

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
