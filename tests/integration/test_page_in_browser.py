"""The page of a real reorder service in a real browser, from no job at all to one that goes on."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.page.browser import HOW, PATIENCE_S, Browser, Look, executable, running_browser

pytestmark = pytest.mark.integration

CHECKS = Path(__file__).parents[1] / "page" / "checks.js"
SOUND = {"faint": [], "nameless": [], "structure": [], "wide": []}


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if executable() is None:
        pytest.skip(f"no Chromium was found: {HOW}")
    folder = tmp_path / "browser"
    folder.mkdir()
    with running_browser(folder) as running:
        yield running


def page_url(log: Path) -> str:
    """Where the service says that it serves the page."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := re.search(r"page url=(\S+)", log.read_text(encoding="utf-8"))):
        assert time.monotonic() < deadline, log.read_text(encoding="utf-8")
        time.sleep(0.05)  # polls the log of a real service
    return found[1]


def test_a_job_appears_and_goes_on(cluster, spec, browser) -> None:
    checks = CHECKS.read_text(encoding="utf-8")
    cluster.start_reorder("--page", "127.0.0.1:0")
    with browser.page(Look(height=4000)) as page:
        page.open(page_url(cluster.folder / "reorder.log"))
        page.until(f"document.body.innerText.includes('headrace job submit job.yaml --endpoint {cluster.endpoint}')")
        cluster.add_preprocessors(1)
        job = cluster.submit(spec("watched", epochs=100))
        page.until("document.getElementById('open-watched') !== null")
        with cluster.consumed(job):
            page.evaluate("document.getElementById('open-watched').click()")
            page.until("/^Mean of \\d+ measured steps: /.test(document.getElementById('steps-time-summary')?.innerText)")
            assert page.evaluate(checks) == SOUND
            for tab, words in {
                "timeline": "as planned",
                "mixture": "delivered",
                "ranks": "committed",
                "quarantine": "",
            }.items():
                page.evaluate(f"document.getElementById('tab-{tab}').click()")
                page.until(f"document.querySelector('[aria-selected=true]').id === 'tab-{tab}'")
                page.until(f"document.getElementById('panel').innerText.includes({words!r})")
                page.until("!document.getElementById('panel').innerText.startsWith('Asking')")
                assert page.evaluate(checks) == SOUND, tab
            page.evaluate("location.hash = '#/preprocessors'")
            page.until("document.querySelectorAll('.member').length === 1")
            assert page.evaluate(checks) == SOUND
            assert page.problems() == []
