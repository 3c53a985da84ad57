"""What a page asks for: one answer that goes on, of what it shows, and nothing while nobody looks at it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from benchmarks.page.viewers import question
from headrace.reorder_service.page import page_server, watched_views
from tests.page.browser import PATIENCE_S, Browser, Look, Page
from tests.page.canned_service import Service

pytestmark = pytest.mark.integration

JOB = "#/job/web-and-charts"
WATCHED = "/api/watch?ask=service&ask=jobs%2Fweb-and-charts"
LINK = "document.getElementById('link').textContent"


def opened(page: Page, address: str, words: str) -> None:
    page.open(address)
    page.until(f"document.body.innerText.includes({words!r})")


def hide(page: Page, hidden: bool) -> None:
    """Have the page believe that its tab is hidden, or is looked at again."""
    value = "true" if hidden else "false"
    page.evaluate(
        f"Object.defineProperty(document, 'hidden', {{ value: {value}, configurable: true }}), "
        "document.dispatchEvent(new Event('visibilitychange'))"
    )


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)  # polls a real server


def test_all_that_a_view_shows_is_one_question_whatever_changes(browser: Browser, service: Service) -> None:
    with browser.page(Look()) as page:
        opened(page, f"{service.url}/{JOB}/timeline", "Step 419 as run")
        for steps in (413, 414):
            service.job["committed_steps"] = steps
            page.until(f"document.body.innerText.includes('{steps} of 1,000 steps')")
        assert set(service.asked) == {f"{WATCHED}&ask=jobs%2Fweb-and-charts%2Ftimeline"}
        page.evaluate("document.getElementById('tab-mixture').click()")
        page.until("document.body.innerText.includes('asked 60%')")
        until(lambda: service.asked[-1] == WATCHED)
        until(lambda: service.num_viewers == 1)  # it has left the other view


def test_a_hidden_tab_asks_nothing_and_one_that_is_looked_at_again_shows_what_it_has_missed(
    browser: Browser, service: Service
) -> None:
    with browser.page(Look()) as page:
        opened(page, f"{service.url}/{JOB}", "412 of 1,000 steps")
        assert service.asked[0] == question("web-and-charts")  # what the benchmark's viewers ask for
        hide(page, hidden=True)
        until(lambda: service.num_viewers == 0)
        asked = len(service.asked)
        service.job["committed_steps"] = 413
        page.evaluate(f"location.hash = '{JOB}/mixture'")
        page.until("document.getElementById('tab-mixture').getAttribute('aria-selected') === 'true'")
        assert (len(service.asked), service.num_viewers) == (asked, 0)
        hide(page, hidden=False)
        page.until("document.body.innerText.includes('413 of 1,000 steps')")
        assert set(service.asked[asked:]) == {WATCHED}


def test_an_answer_that_the_service_ends_is_asked_for_again_and_nothing_is_lost(
    browser: Browser, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_server, "WATCH_S", 0.1)
    with browser.page(Look()) as page:
        opened(page, f"{service.url}/{JOB}", "412 of 1,000 steps")
        until(lambda: len(service.asked) >= 3)
        assert page.evaluate(f"[{LINK}, document.getElementById('said').textContent]") == ["live", ""]


@pytest.mark.slow
def test_a_service_that_says_nothing_any_more_is_said_to_be_lost(
    browser: Browser, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_views, "ALIVE_S", float("inf"))
    with browser.page(Look()) as page:
        opened(page, f"{service.url}/{JOB}", "412 of 1,000 steps")
        page.until(f"{LINK} === 'no answer'")
        page.until(f"{LINK} === 'live'")  # it asks again by itself
