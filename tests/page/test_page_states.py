"""The page in each state of the service, in both themes and on a phone: it fits, it can be read, and it reports no error."""

from __future__ import annotations

import gzip

import pytest

from headrace.reorder_service.page.static_files import STATIC
from tests.page.browser import Browser, Look, Page
from tests.page.canned_service import Service, canned_service

pytestmark = pytest.mark.integration

TALL = 6000  # pixels: all of a view is on the screen, so that what is behind each word can be asked for
LOOKS = {"light": Look(height=TALL), "dark": Look(height=TALL, dark=True), "phone": Look(width=360, height=TALL)}
RUNNING = "#/job/web-and-charts"
VIEWS = [
    ("running", "#/", "2 running, 1 indexing"),
    ("running", "#/preprocessors", "decode-2"),
    ("running", f"{RUNNING}/steps", "Mean of 200 measured steps"),
    ("running", f"{RUNNING}/timeline", "Step 419 as run"),
    ("running", f"{RUNNING}/mixture", "asked 60%"),
    ("running", f"{RUNNING}/ranks", "node-2 was lost"),
    ("running", f"{RUNNING}/quarantine", "137 samples not used"),
    ("running", "#/job/speech-only", "No step is planned yet"),
    ("failed", "#/job/large-run", "mend that and submit the job again"),
    ("failed", "#/job/large-run/timeline", "Not measured."),
    ("finished", "#/job/warm-up", "every step is committed"),
    ("finished", "#/job/warm-up/quarantine", "2 samples not used"),
    ("empty", "#/", "headrace job submit"),
    ("empty", "#/preprocessors", "No preprocessor is connected"),
    ("standby", "#/", "10.0.0.2:7070"),
]
DRAWN = "new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))"
"""The page has been drawn as it is looked at now."""
FIRST_PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


def shows(page: Page, words: str) -> None:
    page.until(f"document.body.innerText.includes({words!r})")


def sound(page: Page, checks: str) -> None:
    """Nothing is too faint, too wide, without a name or out of order, and no error was reported."""
    page.evaluate(DRAWN)
    assert page.evaluate(checks) == {"faint": [], "nameless": [], "structure": [], "wide": []}
    assert page.problems() == []


@pytest.mark.parametrize("name", sorted({name for name, *_ in VIEWS}))
def test_every_state_fits_and_can_be_read(browser: Browser, checks: str, name: str) -> None:
    with canned_service(name) as service, browser.page(LOOKS["light"]) as page:
        page.open(service.url)
        for address, words in [(address, words) for of, address, words in VIEWS if of == name]:
            page.evaluate(f"location.hash = {address!r}")
            shows(page, words)
            page.evaluate("document.querySelectorAll('details:not([open]) summary').forEach((summary) => summary.click())")
            page.until("[...document.querySelectorAll('details')].every((one) => one.querySelector('table'))")
            for look in LOOKS.values():
                page.look_as(look)
                sound(page, checks)
        print(f"first contentful paint: {page.evaluate(FIRST_PAINT)} ms")


def test_names_are_text_whatever_is_in_them(browser: Browser, service: Service, checks: str) -> None:
    with browser.page(LOOKS["light"]) as page:
        page.open(service.url)
        shows(page, "<img src=x onerror=alert(1)>")
        shows(page, "cancelled by <b>someone</b>")
        page.evaluate("[...document.querySelectorAll('.job a')].find((link) => link.textContent.startsWith('<img')).click()")
        page.until("document.querySelector('h1')?.textContent === '<img src=x onerror=alert(1)>'")
        page.evaluate("document.getElementById('tab-mixture').click()")
        shows(page, "<script>alert(1)</script>")
        page.evaluate("document.getElementById('tab-quarantine').click()")
        shows(page, "<img src=x onerror=alert(2)>")
        shows(page, "<script>alert(3)</script> is text")
        assert page.evaluate("document.querySelectorAll('main script, main img:not([src^=data])').length") == 0
        sound(page, checks)


def test_refused_samples_have_a_picture_or_a_sign_of_their_modality(browser: Browser, service: Service, checks: str) -> None:
    told = service.documents["api/jobs/web-and-charts/quarantine"]["rejections"]
    told[1] |= {"modality": "audio", "thumbnail": "data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg'/>"}
    with browser.page(LOOKS["light"]) as page:
        page.open(f"{service.url}/{RUNNING}/quarantine")
        page.until("document.querySelectorAll('td img').length > 0")
        page.until("[...document.querySelectorAll('td img')].every((one) => one.complete && one.naturalWidth > 0)")
        names = page.evaluate(
            "[...document.querySelectorAll('tbody tr')].slice(0, 5).map((row) => row.querySelector('img')?.alt ?? "
            "row.querySelector('svg')?.getAttribute('aria-label') ?? null)"
        )
        assert names == [
            "what can be seen of web/00000/000000",
            "a recording",
            "an image, of which nothing can be seen",
            "what can be seen of web/00000/023757",
            None,
        ]
        sound(page, checks)


def test_the_last_state_stays_while_the_service_does_not_answer(browser: Browser, service: Service, checks: str) -> None:
    with browser.page(LOOKS["dark"]) as page:
        page.open(f"{service.url}/{RUNNING}")
        shows(page, "412 of 1,000 steps")
        service.silent = True
        shows(page, "Connection lost. The service has not answered since")
        shows(page, "412 of 1,000 steps")
        page.until("document.getElementById('said').textContent === 'Connection lost.'")
        sound(page, checks)
        service.silent = False
        page.until("document.getElementById('said').textContent === 'The service answers again.'")
        assert not page.evaluate("document.querySelector('.banner')")


def test_a_service_that_never_answered_is_said_to_be_lost(browser: Browser, service: Service, checks: str) -> None:
    service.silent = True
    with browser.page(LOOKS["phone"]) as page:
        page.open(service.url)
        shows(page, "The reorder service has not answered since this page was opened")
        sound(page, checks)


def test_a_change_of_state_is_announced_and_what_moves_is_not(browser: Browser, service: Service) -> None:
    with browser.page(LOOKS["light"]) as page:
        page.open(f"{service.url}/{RUNNING}")
        shows(page, "412 of 1,000 steps")
        service.job["committed_steps"] = 413
        shows(page, "413 of 1,000 steps")
        assert page.evaluate("document.getElementById('said').textContent") == ""
        service.job.update(state="done", committed_steps=1000, finding="every step is committed", held_up=False)
        page.until("document.getElementById('said').textContent === 'web-and-charts is done.'")
        shows(page, "1,000 of 1,000 steps")


def test_a_token_is_asked_for_and_kept_for_the_tab(browser: Browser, checks: str) -> None:
    with canned_service(token="let-me-in") as service, browser.page(LOOKS["phone"]) as page:
        page.open(service.url)
        shows(page, "the request brought none")
        sound(page, checks)
        for typed, words in (("wrong", "the request brought another one"), ("let-me-in", "web-and-charts")):
            page.evaluate("document.getElementById('token').value = ''; document.getElementById('token').focus()")
            page.type(typed)
            page.press("Enter")
            shows(page, words)
        assert page.evaluate("localStorage.length") == 0
        assert not any("let-me-in" in path for path in service.asked)
        page.open(f"{service.url}/?again")
        shows(page, "web-and-charts")
        page.evaluate("document.getElementById('forget').click()")
        shows(page, "the request brought none")


def test_a_job_that_is_not_there_is_one_sentence(browser: Browser, service: Service, checks: str) -> None:
    with browser.page(LOOKS["light"]) as page:
        page.open(f"{service.url}/#/job/nobody/steps")
        shows(page, "no job is called nobody: headrace job list has their names")
        sound(page, checks)


def test_the_page_is_small_and_needs_nothing_else() -> None:
    files = [path for path in STATIC.rglob("*") if path.is_file()]
    assert sum(len(gzip.compress(path.read_bytes())) for path in files) < 40_000
    for path in files:
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text.replace("`${location.protocol}//", "")
        assert "https://" not in text
        assert "innerHTML" not in text
        assert "insertAdjacentHTML" not in text


def test_a_step_as_run_says_what_its_rows_are_aligned_by(browser: Browser, service: Service, checks: str) -> None:
    timeline = service.documents["api/jobs/web-and-charts/timeline"]
    with browser.page(LOOKS["light"]) as page:
        page.open(f"{service.url}/{RUNNING}/timeline")
        shows(page, "aligned by the clocks of their hosts")
        whole = {"kind": "whole", "microbatch": 3, "chunk": 1, "unit": "", "begin_s": 0.0, "end_s": 0.4}
        timeline["aligned_by"], timeline["measured_rows"] = "first_action", [{"name": "all units", "actions": [whole]}]
        shows(page, "each row begins with its own first action")
        shows(page, "all units, forward and backward")
        page.evaluate("document.getElementById('timeline-run').focus()")
        page.press("ArrowRight")
        said = "document.getElementById('timeline-run').getAttribute('aria-valuetext')"
        page.until(f"{said}?.startsWith('all units: all units, forward and backward of microbatch 3, chunk 1, 0 to ')")
        for look in LOOKS.values():
            page.look_as(look)
            sound(page, checks)


def test_the_wait_for_sums_of_gradients_is_told_from_computing(browser: Browser, service: Service, checks: str) -> None:
    timeline = service.documents["api/jobs/web-and-charts/timeline"]
    backward = {"kind": "backward", "microbatch": 0, "unit": "llm", "begin_s": 0.0, "end_s": 0.4}
    reduction = {"kind": "reduction", "unit": "llm", "begin_s": 0.4, "end_s": 0.8}
    timeline["measured_rows"] = [{"name": "llm", "actions": [backward, reduction]}]
    with browser.page(LOOKS["light"]) as page:
        page.open(f"{service.url}/{RUNNING}/timeline")
        shows(page, "llm sums of gradients")
        shows(page, "From the first action to the last it took 400 ms, of which rows computed nothing for 0%")
        page.evaluate("document.getElementById('timeline-run').focus()")
        page.press("End", 2)
        said = "document.getElementById('timeline-run').getAttribute('aria-valuetext')"
        page.until(f"{said}?.startsWith('llm: llm sums of gradients, ')")
        for look in LOOKS.values():
            page.look_as(look)
            sound(page, checks)


def test_numbers_are_written_as_they_are_read(browser: Browser, service: Service) -> None:
    with browser.page(LOOKS["light"]) as page:
        page.open(service.url)
        shows(page, "web-and-charts")
        written = page.evaluate("""Promise.all(['format', 'chart', 'route'].map((name) => import(`/static/${name}.js`))).then(
            ([format, chart, route]) => ({
                seconds: [0, 0.000012, 0.8123, 1.2345, 119, 200, 7500, null].map((value) => format.seconds(value)),
                shares: [0, 0.0004, 0.05, 0.412, 1, null].map((value) => format.share(value)),
                bytes: [0, 1023, 1536, 2 ** 31].map((value) => format.bytes(value)),
                ticks: [chart.ticks(0, 1, 4), chart.ticks(3, 7, 9, true), chart.ticks(1, 1.02, 4)].map(
                    ({ values, write }) => values.map((value) => write(value))),
                ends: [[1, 2, null], [...Array(99).fill(1), 50], []].map((values) => chart.top(values).end),
                routes: ['#/job/a%2Fb/ranks', '#/job/x?last=50', '#/nowhere', '#/job/%', ''].map((hash) => route.parsed(hash)),
            }))""")
    assert written == {
        "seconds": ["0 s", "12 µs", "812 ms", "1.23 s", "119 s", "3 min 20 s", "2 h 5 min", "not measured"],
        "shares": ["0%", "0.0%", "5.0%", "41%", "100%", "not measured"],
        "bytes": ["0 B", "1,023 B", "1.5 KiB", "2 GiB"],
        "ticks": [["0.0", "0.5", "1.0"], ["3", "4", "5", "6", "7"], ["1.000", "1.005", "1.010", "1.015", "1.020"]],
        "ends": [2, 1.5, 1],
        "routes": [
            {"page": "job", "job": "a/b", "tab": "ranks", "options": {}},
            {"page": "job", "job": "x", "tab": "steps", "options": {"last": "50"}},
            {"page": "jobs", "options": {}},
            {"page": "job", "job": "%", "tab": "steps", "options": {}},
            {"page": "jobs", "options": {}},
        ],
    }
