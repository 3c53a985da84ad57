"""The page without a pointer: every control is reached by Tab and shows that it is, and tabs and charts answer the arrow keys."""

from __future__ import annotations

import pytest

from tests.page.browser import Browser, Look, Page
from tests.page.canned_service import Service, canned_service, state

pytestmark = pytest.mark.integration

RUNNING = "#/job/web-and-charts"
CONTROLS = """[...document.querySelectorAll('a[href], button, input, summary, [tabindex="0"]')]
    .filter((node) => node.checkVisibility() && node.tabIndex >= 0)"""
CHART = "document.getElementById('steps-time')"
NAME = "(node) => node.id || node.getAttribute('aria-label') || node.textContent.trim()"
SHOWN = """(() => {
    const node = document.activeElement, style = getComputedStyle(node, node.matches('.job a') ? '::after' : null);
    return style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2;
})()"""


def focused(page: Page) -> str:
    return page.evaluate(f"({NAME})(document.activeElement)")


def loaded(page: Page, address: str, words: str) -> None:
    page.open(address)
    page.until(f"document.body.innerText.includes({words!r})")


@pytest.mark.parametrize(
    ("name", "address", "words"),
    [
        ("running", "#/", "web-and-charts"),
        ("running", f"{RUNNING}/steps", "Mean of"),
        pytest.param("running", f"{RUNNING}/timeline", "as run", marks=pytest.mark.slow),
        pytest.param("running", f"{RUNNING}/quarantine", "137 samples", marks=pytest.mark.slow),
        ("empty", "#/", "headrace job submit"),
        pytest.param("standby", "#/", "stands by", marks=pytest.mark.slow),
    ],
)
def test_tab_reaches_every_control_and_shows_where_it_is(browser: Browser, name: str, address: str, words: str) -> None:
    with canned_service() as service, browser.page(Look()) as page:
        service.documents = state(name)
        loaded(page, f"{service.url}/{address}", words)
        expected = page.evaluate(f"{CONTROLS}.map({NAME})")
        reached = []
        for _ in expected:
            page.press("Tab")
            reached.append(focused(page))
            assert page.evaluate(SHOWN), reached[-1]
        assert reached == expected


def test_the_first_stop_leads_to_the_content(browser: Browser, service: Service) -> None:
    with browser.page(Look()) as page:
        loaded(page, service.url, "web-and-charts")
        page.press("Tab")
        assert focused(page) == "Skip to the content"
        assert page.evaluate("document.activeElement.getBoundingClientRect().top") >= 0
        page.press("Enter")
        assert focused(page) == "main"
        page.press("Tab")
        assert focused(page) == "open-web-and-charts"
        page.press("Enter")
        page.until("location.hash === '#/job/web-and-charts'")
        page.until("document.querySelector('h1').textContent === 'web-and-charts'")
        assert focused(page) == "main"


def test_arrow_keys_go_from_tab_to_tab_and_the_address_follows(browser: Browser, service: Service) -> None:
    with browser.page(Look()) as page:
        loaded(page, f"{service.url}/{RUNNING}", "Mean of")
        page.evaluate("document.getElementById('tab-steps').focus()")
        page.press("ArrowRight")
        page.until("location.hash === '#/job/web-and-charts/timeline'")
        page.until("document.getElementById('timeline-planned') !== null")
        assert focused(page) == "tab-timeline"
        page.press("End")
        page.until("document.getElementById('tab-quarantine').getAttribute('aria-selected') === 'true'")
        page.press("ArrowRight")
        page.until("document.getElementById('steps-time') !== null")
        assert focused(page) == "tab-steps"
        page.evaluate("history.back()")
        page.until("location.hash === '#/job/web-and-charts/quarantine'")
        page.until("document.body.innerText.includes('137 samples not used')")


def test_arrow_keys_read_a_chart_step_by_step(browser: Browser, service: Service) -> None:
    with browser.page(Look()) as page:
        loaded(page, f"{service.url}/{RUNNING}/steps", "Mean of")
        page.evaluate(f"{CHART}.focus()")
        page.press("Home")
        page.until(f"{CHART}.getAttribute('aria-valuetext').startsWith('step 212: measured ')")
        page.press("ArrowRight", times=2)
        page.until(f"{CHART}.getAttribute('aria-valuenow') === '214'")
        page.press("End")
        page.until(f"{CHART}.getAttribute('aria-valuetext').startsWith('step 411: measured ')")
        service.job["committed_steps"] += 1
        page.until("document.body.innerText.includes('413 of 1,000 steps')")
        assert focused(page) == "steps-time"


def test_arrow_keys_read_a_timeline_box_by_box(browser: Browser, service: Service) -> None:
    with browser.page(Look()) as page:
        loaded(page, f"{service.url}/{RUNNING}/timeline", "as run")
        page.evaluate("document.getElementById('timeline-planned').focus()")
        said = "document.getElementById('timeline-planned').getAttribute('aria-valuetext')"
        page.press("ArrowRight")
        page.until(f"{said}.startsWith('vision 0: vision forward of microbatch 0, 0 to ')")
        page.press("ArrowRight")
        page.until(f"{said}.startsWith('vision 0: vision forward of microbatch 1')")
        page.press("ArrowDown", times=2)
        page.until(f"{said}.startsWith('llm 0: llm forward of microbatch ')")
        page.press("End")
        page.until(f"{said}.startsWith('llm 0: llm backward of microbatch 9')")


def test_what_is_typed_finds_jobs_and_stays_while_the_page_is_drawn_again(browser: Browser, service: Service) -> None:
    jobs = service.documents["api/jobs"]["jobs"]
    jobs += [{**jobs[0], "job": f"sweep-{number}"} for number in range(300)]
    with browser.page(Look()) as page:
        loaded(page, service.url, "107 more are not shown")
        page.evaluate("document.getElementById('filter').focus()")
        page.type("sweep-29")
        page.until("document.querySelectorAll('.job').length === 11")
        jobs[0]["committed_steps"] = 500
        service.documents["api/jobs"]["jobs"] = [{**job, "committed_steps": 501} for job in jobs]
        page.until("document.body.innerText.includes('501 of 1,000 steps')")
        assert focused(page) == "filter"
        assert page.evaluate("document.getElementById('filter').value") == "sweep-29"


def test_pointing_at_a_chart_reads_it(browser: Browser, service: Service) -> None:
    with browser.page(Look(height=2000)) as page:
        loaded(page, f"{service.url}/{RUNNING}/steps", "Mean of")
        left, top = (page.evaluate(f"{CHART}.getBoundingClientRect().{side}") for side in ("left", "top"))
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + 53, y=top + 90)
        page.until(f"{CHART}.getAttribute('aria-valuenow') === '212'")
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=5, y=5)
        page.until(f"{CHART}.getAttribute('aria-valuenow') === '411'")
