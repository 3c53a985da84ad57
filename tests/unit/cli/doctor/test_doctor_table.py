"""The printed table fits its terminal, and the JSON document has all that it says."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from headrace.cli.doctor.diagnosis import Diagnosis, fault, ok, warning
from headrace.cli.doctor.doctor_table import document, picture

REMEDY = "give it more (in a container --shm-size 1g), or start preprocessors with --budget-mib 32, and see docs/doctor.md"
PARTS = {
    "installation": [
        ok("Python", "3.11.7 (CPython, x86_64)"),
        ok("extra lance", "not installed; it gives Lance data sets", "`pip install 'headrace[lance]'`"),
        warning("/dev/shm", "64 of 64 MiB are free, fewer than the 512 that a preprocessor takes by default", REMEDY),
    ],
    "stack": [fault("reorder-0.reorder.headrace.svc.cluster.local:7070", "nothing listens there", "start it [there]")],
}


def printed(width: int, parts: dict[str, list[Diagnosis]] = PARTS) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(picture(parts))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_nothing_is_cut_off(width: int) -> None:
    text = printed(width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    for part in ("installation", "stack"):
        assert part in words
    assert "budget-mib 32, and see docs/doctor.md" in " ".join(words.split())
    assert "start it [there]" in words
    assert words.endswith("1 fault, 1 warning, 2 ok")


def test_all_well_is_said_so() -> None:
    assert printed(80, {"installation": [ok("Python", "3.11.7")]}).splitlines()[-1] == "all well: 1 checks"


def test_the_document_has_every_check() -> None:
    read = json.loads(json.dumps(document(PARTS)))
    assert read["state"] == "fault"
    assert read["counts"] == {"ok": 2, "warning": 1, "fault": 1}
    assert read["checks"][2] == {
        "part": "installation",
        "check": "/dev/shm",
        "state": "warning",
        "found": PARTS["installation"][2].found,
        "remedy": REMEDY,
    }
