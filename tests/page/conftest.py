"""A browser for the tests of a file, and a server for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.page.browser import HOW, Browser, executable, running_browser
from tests.page.canned_service import Service, canned_service


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if executable() is None:
        pytest.skip(f"no Chromium was found: {HOW}")
    with running_browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture(scope="module")
def checks() -> str:
    return (Path(__file__).parent / "checks.js").read_text(encoding="utf-8")


@pytest.fixture
def service() -> Iterator[Service]:
    with canned_service() as running:
        yield running
