"""The log: one line per event on standard error, as text that can be grepped or as JSON.

log.info("planned %s", pairs(job="demo", step=3)) writes one of these lines:

15:04:05.678 reorder INFO planned job=demo step=3
{"time": "2025-06-01T15:04:05.678Z", "level": "INFO", "service": "reorder", "logger": "headrace.reorder_service.jobs.job",
 "event": "planned", "job": "demo", "step": 3}
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from numbers import Integral, Real
from typing import Any

from headrace.errors import UserError
from headrace.printable import printable

LOG_FORMATS = ("text", "json")


def configure_logging(service: str, log_format: str = "") -> None:
    """Send this process's log to standard error under the name of its service. HEADRACE_LOG sets the level.

    `log_format`: one of LOG_FORMATS; empty: the value of HEADRACE_LOG_FORMAT, or "text". Raises UserError for an invalid level or
    format.
    """
    level = os.environ.get("HEADRACE_LOG", "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        raise UserError(f"HEADRACE_LOG={level} is no level; take DEBUG, INFO, WARNING or ERROR")
    log_format = log_format or os.environ.get("HEADRACE_LOG_FORMAT", "") or "text"
    if log_format not in LOG_FORMATS:
        raise UserError(f"HEADRACE_LOG_FORMAT={log_format} is no format; take {' or '.join(LOG_FORMATS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if log_format == "json" else _text_formatter(service))
    logging.basicConfig(handlers=[handler], level=level, force=True)


@dataclass(frozen=True, slots=True)
class Pairs:
    """The fields of a log event. As text they read `a=1 b=two`, with values that hold blanks in quotes, and `c=-` for None."""

    values: Mapping[str, object]

    def __str__(self) -> str:
        return " ".join(f"{key}={_quoted(value)}" for key, value in self.values.items())


def pairs(**values: object) -> Pairs:
    """Return the fields of a log event, to be passed to the logger as an argument for a `%s`."""
    return Pairs(values)


class JsonFormatter(logging.Formatter):
    """A formatter that writes each event as one line of JSON: time (RFC 3339, UTC), level, service, logger, event, exception if
    there is one, and then the event's fields.

    Numbers stay numbers, numbers that are not finite become null, and values of any other type become strings.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        args = record.args if isinstance(record.args, tuple) else ()
        fields = {key: _plain(value) for arg in args if isinstance(arg, Pairs) for key, value in arg.values.items()}
        bare = copy.copy(record)
        if args:
            bare.args = tuple("" if isinstance(arg, Pairs) else arg for arg in args)
        head = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "event": bare.getMessage().strip(),
        }
        if record.exc_info:
            head["exception"] = self.formatException(record.exc_info)
        return json.dumps({**head, **fields, **head})  # the head comes first, and no field can override it


class TextFormatter(logging.Formatter):
    """A formatter that writes each event as one line of text, with unprintable characters escaped: names of samples may hold line
    breaks and terminal control sequences.

    A traceback follows its event in indented lines, so that none of them can be taken for an event.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the base class's name
        return "\n".join(f"  {line}" for line in printable(super().formatException(ei), keep="\n").split("\n"))


def _text_formatter(service: str) -> logging.Formatter:
    return TextFormatter(f"%(asctime)s.%(msecs)03d {service} %(levelname)s %(message)s", datefmt="%H:%M:%S")


def _quoted(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else "-" if value is None else str(value)
    return '"' + text.replace('"', '\\"') + '"' if " " in text else text


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    return str(value)
