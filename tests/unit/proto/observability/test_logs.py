"""The log of a process: the same events as text and as JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import datetime, timedelta

import pytest

EVENTS = """
import logging, math, pathlib
from headrace.quarantine import Reason
from headrace.observability.logs import configure_logging, pairs
import numpy as np
configure_logging("reorder", {log_format!r})
log = logging.getLogger("headrace.reorder_service.jobs.job")
log.info("planned %s", pairs(job="a b", step=3, bubble=0.12345, rows=np.int64(7), done=True, loss=math.nan, what=None))
log.info("%s %s", "paused", pairs(job="a", event="mine"))
log.warning("quarantined %s", pairs(reason=Reason.CORRUPT_MEDIA, path=pathlib.Path("/d")))
log.warning("waiting for job=%s: %s", "a", "two\\nlines")
log.warning("%(n)d of a dictionary", {{"n": 3}})
log.info("ready")
try:
    raise OSError("gone")
except OSError:
    log.exception("order failed %s", pairs(lease="p-1"))
"""


def log_of(log_format: str = "") -> list[str]:
    code = EVENTS.format(log_format=log_format)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


@pytest.mark.parametrize("by_environment", [False, True])
def test_every_line_is_an_object_with_typed_fields(monkeypatch, by_environment) -> None:
    monkeypatch.setenv("HEADRACE_LOG_FORMAT", "json" if by_environment else "text")
    events = [json.loads(line) for line in log_of("" if by_environment else "json")]
    for event in events:
        assert list(event)[:5] == ["time", "level", "service", "logger", "event"]
        assert event["time"].endswith("Z")
        assert datetime.fromisoformat(event["time"]).utcoffset() == timedelta(0)
        assert (event["service"], event["logger"]) == ("reorder", "headrace.reorder_service.jobs.job")
    assert [(event["level"], event["event"]) for event in events] == [
        ("INFO", "planned"),
        ("INFO", "paused"),
        ("WARNING", "quarantined"),
        ("WARNING", "waiting for job=a: two\nlines"),
        ("WARNING", "3 of a dictionary"),
        ("INFO", "ready"),
        ("ERROR", "order failed"),
    ]
    fields = [dict(list(event.items())[5:]) for event in events]
    assert fields[0] == {"job": "a b", "step": 3, "bubble": 0.12345, "rows": 7, "done": True, "loss": None, "what": None}
    assert fields[1] == {"job": "a"}
    assert fields[2] == {"reason": "corrupt_media", "path": "/d"}
    assert fields[3:6] == [{}, {}, {}]
    assert fields[6]["lease"] == "p-1"
    assert fields[6]["exception"].endswith("OSError: gone")


def test_text_is_a_line_with_pairs() -> None:
    planned, paused, *_ = log_of()
    line = 'reorder INFO planned job="a b" step=3 bubble=0.123 rows=7 done=True loss=nan what=-'
    assert re.fullmatch(rf"\d\d:\d\d:\d\d\.\d\d\d {re.escape(line)}", planned)
    assert paused.endswith("reorder INFO paused job=a event=mine")


def test_an_unknown_format_is_told_with_those_that_there_are() -> None:
    code = "from headrace.observability.logs import configure_logging; configure_logging('reorder')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={"HEADRACE_LOG_FORMAT": "xml"}
    )
    assert "HEADRACE_LOG_FORMAT=xml is no format; take text or json" in done.stderr
