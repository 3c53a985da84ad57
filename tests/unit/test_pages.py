"""The pages of the documentation are whole: no dead link, no word that stands for what was still to be written, none unlisted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from website.headings import anchors

ROOT = Path(__file__).parents[2]
INDEX = ROOT / "docs" / "README.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*/README.md"))]
UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX|SIZES|COMPOSE_RUN)\b")


@pytest.mark.parametrize("page", sorted(set(PAGES)), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_no_unfinished_word_and_no_dead_link(page: Path) -> None:
    text = page.read_text()
    assert UNFINISHED.findall(text) == []
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", prose) if not link.startswith("http")]
    assert [link for link in links if not _leads_somewhere(page, link)] == []


def _leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not anchor or target.suffix != ".md" or anchor in anchors(target.read_text()))


def test_every_page_is_in_the_list_of_pages() -> None:
    text = INDEX.read_text()
    pages = [page.relative_to(INDEX.parent).as_posix() for page in INDEX.parent.rglob("*.md") if page != INDEX]
    assert [page for page in pages if f"]({page})" not in text] == []


def test_the_first_page_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120] == []
