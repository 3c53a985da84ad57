"""Of each layout Headrace reads what the writer's own reader reads, or refuses it in a sentence; docs/layouts.md tells which."""

from __future__ import annotations

import pytest

from tests.layouts.catalogue import LAYOUTS
from tests.layouts.judging import Store, unpack, verdicts_of
from tests.layouts.layout import Layout
from tests.layouts.table import DOCUMENT, render
from tests.layouts.verdict import Outcome, Verdict

Verdicts = dict[str, tuple[Verdict, Verdict]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return unpack(tmp_path_factory.mktemp("layouts"))


@pytest.fixture(scope="module")
def verdicts() -> Verdicts:
    """What the tests of single layouts have found, for the table."""
    return {}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_is_read_as_by_its_own_reader_or_refused(layout: Layout, store: Store, verdicts: Verdicts) -> None:
    verdicts[layout.name] = both = verdicts_of(layout, store)
    for verdict in both:
        assert verdict.outcome is not Outcome.WRONG, verdict.detail
        assert verdict.outcome is Outcome.RIGHT or len(verdict.detail.split()) > 3, "a refusal is a sentence"
    if layout.refused_because:
        assert both[0].outcome is Outcome.REFUSED


def test_the_table_is_fresh(store: Store, verdicts: Verdicts) -> None:
    """docs/layouts.md says what the tests find; `make layouts-table` rewrites it."""
    found = [(layout, *(verdicts.get(layout.name) or verdicts_of(layout, store))) for layout in LAYOUTS]
    assert DOCUMENT.read_text(encoding="utf-8") == render(found, store.libraries), "run `make layouts-table`"
