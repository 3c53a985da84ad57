"""Whatever data sets hold, it can be sent, kept and shown: nothing of it commands a terminal, or begins a line of a log."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SpecError
from headrace.message_codec import rejection_message, rejection_value
from headrace.observability.logs import TextFormatter, pairs
from headrace.printable import printable, sendable
from headrace.quarantine import MAX_DETAIL, Reason, Rejected
from headrace.spec import load_spec_json, load_spec_yaml, parse_spec
from headrace.topology_spec import load_topology_json

ANY_TEXT = st.text(st.characters(exclude_categories=()))  # lone surrogates too


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("photo-01.jpg", "photo-01.jpg"),
        ("写真　東京.jpg", "写真　東京.jpg"),
        ("a\x1b[2Jb", "a\\x1b[2Jb"),
        ("a\n12:00:00 forged", "a\\n12:00:00 forged"),
        ("\x9b31m", "\\x9b31m"),
        ("\u202egpj.exe", "\\u202egpj.exe"),
        ("\ud800", "\\ud800"),
    ],
)
def test_what_is_not_to_be_seen_is_an_escape(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_lines_stay_where_they_may() -> None:
    assert printable("a\n\tb\x07", keep="\n\t") == "a\n\tb\\x07"


@given(name=ANY_TEXT, detail=ANY_TEXT)
def test_every_rejection_can_be_sent_and_shown(name: str, detail: str) -> None:
    item = Rejected(name=name, reason=Reason.SCHEMA_ERROR, detail=detail, sample_id=3, row=1)
    message = rejection_message(item)
    assert rejection_value(type(message).FromString(message.SerializeToString())) == item
    assert printable(item.detail) == item.detail
    assert len(item.detail) <= MAX_DETAIL + 1
    sendable(name).encode()


def test_a_long_detail_is_cut() -> None:
    item = Rejected(name="s/a/1", reason=Reason.SCHEMA_ERROR, detail="x" * 100_000)
    assert item.detail == "x" * MAX_DETAIL + "…"


def test_an_event_is_one_line_of_the_log_whatever_it_tells_of() -> None:
    formatter = TextFormatter("%(levelname)s %(message)s")
    arguments = (pairs(job="j", sample='s/a/\x1b[31m"x y"\n12:00:00 INFO forged'),)
    record = logging.LogRecord("n", logging.INFO, "f", 1, "quarantined %s", arguments, None)
    line = formatter.format(record)
    assert line == 'INFO quarantined job=j sample="s/a/\\x1b[31m\\"x y\\"\\n12:00:00 INFO forged"'


def test_no_line_of_a_traceback_passes_for_an_event_or_commands_a_terminal() -> None:
    formatter = TextFormatter("%(levelname)s %(message)s")
    try:
        raise ValueError("no picture: a\x1b[31m\r\x85b\nERROR forged")
    except ValueError:
        record = logging.LogRecord("n", logging.ERROR, "f", 1, "unexpected error", None, sys.exc_info())
    event, *traceback = formatter.format(record).split("\n")
    assert event == "ERROR unexpected error"
    assert traceback[0] == "  Traceback (most recent call last):"
    assert traceback[-2:] == ["  ValueError: no picture: a\\x1b[31m\\r\\x85b", "  ERROR forged"]
    assert all(line.startswith("  ") and line.isprintable() for line in traceback)


DEEP, LONG = 20_000, "9" * 5000


@pytest.mark.parametrize(
    "text",
    [
        "[" * DEEP,
        '{"name": "j", "sources": ' + "[" * DEEP + "]" * DEEP + "}",
        '{"a":' * DEEP + "1" + "}" * DEEP,
        f'{{"name": "j", "sources": [{{"path": "/d"}}], "seed": {LONG}}}',
        '{"name": "j", "sources": [{"path": "/d\\ud800"}]}',
        '{"name": "j", "sources": [{"path": "/d"}], "\\u001b[2J": 1}',
        '{"name": "' + "x" * 100_000 + '", "sources": [{"path": "/d"}]}',
    ],
    ids=["deep", "deep field", "deep mappings", "long integer", "surrogate", "escape in a field", "long name"],
)
def test_json_that_is_no_spec_is_refused_in_a_short_sentence(text: str) -> None:
    for load in (load_spec_json, load_topology_json):
        with pytest.raises(SpecError) as refusal:
            load(text)
        assert len(str(refusal.value)) < 400
        assert str(refusal.value).isprintable()


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "[" * DEEP + "]" * DEEP,
        "\n".join("  " * depth + "a:" for depth in range(2000)),
        f"name: j\nsources: [{{path: /d}}]\nseed: {LONG}",
        'name: j\nsources: [{path: "/d\\ud800"}]',
        "name: j\nsources: [{path: 2001-99-99}]",
        'name: j\nsources: [{path: /d}]\n"\\e[2J": 1',
    ],
    ids=["deep", "deep mappings", "long integer", "surrogate", "date", "escape in a field"],
)
def test_yaml_that_is_no_spec_is_refused_in_a_short_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as refusal:
        load_spec_yaml(path)
    assert len(str(refusal.value)) < 400 + len(str(path))
    assert str(refusal.value).isprintable()


def test_a_long_integer_of_a_document_is_refused() -> None:
    with pytest.raises(SpecError):
        parse_spec({"name": "j", "sources": [{"path": "/d"}], "seed": 10**5000})
    with pytest.raises(SpecError, match=r"global_batch: .*, got 'many'"):
        parse_spec(json.loads('{"name": "j", "sources": [{"path": "/d"}], "global_batch": "many"}'))
