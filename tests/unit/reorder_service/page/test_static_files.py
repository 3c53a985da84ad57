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
    [content] = {path.split("/")[2] for path in answers if path.count("/") > 2} - {"parts"}
    names = {"index.html", "page.css", "parts/chart.js"}
    assert set(answers) == {"/"} | {f"/static/{name}" for name in names} | {f"/static/{content}/{name}" for name in names}
    assert answers["/"].body == b"index.html"
    assert answers["/"].headers["Content-Type"] == "text/html; charset=utf-8"
    assert answers["/static/parts/chart.js"].headers["Content-Type"] == "text/javascript; charset=utf-8"
    policy = answers["/"].headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'self'; img-src 'self' data:;")


def test_what_the_page_loads_is_kept_by_browsers_until_it_is_another(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<script src="static/page.js"></script>')
    (tmp_path / "page.js").write_text('import "./chart.js"')
    loaded = set()
    for chart in ("one", "another"):
        (tmp_path / "chart.js").write_text(chart)
        answers = static_answers(tmp_path)
        assert answers["/"].headers["Cache-Control"] == "no-cache"
        script = answers["/"].body.decode().split('"')[1]
        loaded.add(script)
        imported = answers[f"/{script.rpartition('/')[0]}/chart.js"]
        assert (imported.body.decode(), imported.headers["Cache-Control"]) == (chart, "public, max-age=31536000, immutable")
    assert len(loaded) == 2


def test_who_takes_gzip_has_the_same_files_in_a_third_of_the_bytes() -> None:
    plain, packed = static_answers(), static_answers(packed=True)
    assert plain.keys() == packed.keys()
    assert all(gzip.decompress(packed[path].body) == plain[path].body for path in plain)
    assert {answer.headers["Content-Encoding"] for answer in packed.values()} == {"gzip"}
    assert sum(len(answer.body) for path, answer in packed.items() if path.count("/") == 2) < 40_000


def test_an_installation_without_the_files_has_no_page(tmp_path: Path) -> None:
    assert static_answers(tmp_path / "none") == {}
