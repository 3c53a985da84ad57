"""The log: one short line an event on standard error, `key=value` pairs that can be grepped."""

from __future__ import annotations

import logging
import os
import sys

from headrace.errors import UserError


def configure_logging(service: str) -> None:
    """Send this process's log to standard error under the name of its service. HEADRACE_LOG sets the level."""
    level = os.environ.get("HEADRACE_LOG", "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        raise UserError(f"HEADRACE_LOG={level} is no level; take DEBUG, INFO, WARNING or ERROR")
    logging.basicConfig(
        stream=sys.stderr,
        level=level,
        format=f"%(asctime)s.%(msecs)03d {service} %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )


def pairs(**values: object) -> str:
    """`a=1 b=two`; values with blanks are quoted."""
    return " ".join(f"{key}={_quoted(value)}" for key, value in values.items())


def _quoted(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return f'"{text}"' if " " in text else text
