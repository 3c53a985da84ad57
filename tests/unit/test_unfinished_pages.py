"""No page has a word left in it that stands for what was still to be written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX|SIZES|COMPOSE_RUN)\b")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_has_an_unfinished_word(page: Path) -> None:
    assert UNFINISHED.findall(page.read_text()) == []
