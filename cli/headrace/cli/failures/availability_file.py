"""Availability traces in files: CSV or JSONL with columns time_s, node and event, in order of time."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.errors import UserError
from headrace.reorder_service.recovery.forecast.availability import BACK, LOST, NodeEvent, Trace, nodes_at_start, trace_of

_COLUMNS = ("time_s", "node", "event")
_JSONL = (".jsonl", ".ndjson")


def read_trace(path: Path, num_nodes: int, end_s: float | None) -> Trace:
    """Read the availability trace of a cluster that starts with `num_nodes` nodes; it ends at `end_s` or its last event.

    Raises UserError where the file cannot be read or is not a valid trace.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        reason = err.strerror if isinstance(err, OSError) else "it is no text"
        raise UserError(f"cannot read {path}: {reason}; --trace takes CSV or JSONL with {', '.join(_COLUMNS)}") from err
    rows = _jsonl_rows(path, text) if path.suffix in _JSONL else _csv_rows(path, text)
    events = [_event(path, line, row) for line, row in rows]
    if not events:
        raise UserError(f"{path} has no event; a trace has one or more rows of {', '.join(_COLUMNS)}")
    end_s = events[-1].time_s if end_s is None else end_s
    if end_s <= 0:
        raise UserError(f"{path} ends where it begins, at 0 s; say with --hours how long it goes on")
    try:
        return trace_of(events, nodes_at_start(events, num_nodes), end_s)
    except UserError as err:
        raise UserError(f"{path}: {err}") from err


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise UserError(f"{path}, line 1: no column {missing[0]}; begin with a line {','.join(_COLUMNS)}")
    for row in reader:
        yield reader.line_num, row


def _jsonl_rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, row in enumerate(text.splitlines(), start=1):
        if not row.strip():
            continue
        try:
            parsed = json.loads(row)
        except json.JSONDecodeError as err:
            raise UserError(f"{path}, line {line}: not JSON ({err.msg}); write one object a line") from err
        if not isinstance(parsed, dict) or any(name not in parsed for name in _COLUMNS):
            raise UserError(f"{path}, line {line}: no object with {', '.join(_COLUMNS)}; write one a line")
        yield line, parsed


def _event(path: Path, line: int, row: dict[str, Any]) -> NodeEvent:
    time, node, event = (row[name] for name in _COLUMNS)
    try:
        time_s = float(time)
    except (TypeError, ValueError) as err:
        raise UserError(f"{path}, line {line}: time_s is seconds since the start, got {time!r}; write a number") from err
    if event not in (LOST, BACK) or not node:
        raise UserError(f"{path}, line {line}: got node {node!r} and event {event!r}; name a node, and {LOST} or {BACK}")
    return NodeEvent(time_s=time_s, node=str(node), event=event, line=line)
