"""The files of the page: those of a folder and nothing else."""

from __future__ import annotations

import gzip
from pathlib import Path

from headrace.reorder_service.page.static_files import static_answers


def test_only_files_that_a_page_is_made_of_are_served(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    for name in ("index.html", "page.css", "parts/chart.js", ".hidden.js", "notes.md"):
        (tmp_path / name).write_text(name)
    answers = static_answers(tmp_path)
    assert set(answers) == {"/", "/static/index.html", "/static/page.css", "/static/parts/chart.js"}
    assert answers["/"].body == b"index.html"
    assert answers["/"].headers["Content-Type"] == "text/html; charset=utf-8"
    assert answers["/static/parts/chart.js"].headers["Content-Type"] == "text/javascript; charset=utf-8"
    policy = answers["/"].headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'self'; img-src 'self' data:;")


def test_who_takes_gzip_has_the_same_files_in_a_third_of_the_bytes() -> None:
    plain, packed = static_answers(), static_answers(packed=True)
    assert plain.keys() == packed.keys()
    assert all(gzip.decompress(packed[path].body) == plain[path].body for path in plain)
    assert {answer.headers["Content-Encoding"] for answer in packed.values()} == {"gzip"}
    assert sum(len(answer.body) for answer in packed.values()) < 40_000


def test_an_installation_without_the_files_has_no_page(tmp_path: Path) -> None:
    assert static_answers(tmp_path / "none") == {}
