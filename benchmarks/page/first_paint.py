"""How soon a browser paints the page, by its own clock: the headless Chromium of the tests.

Each load has a storage of its own, so that nothing is kept from the one before; it is loaded a second time with what it has kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.page.browser import Browser, Look, Page

LOADS = 9
FIRST = "performance.getEntriesByType('paint').find(({ name }) => name === 'first-contentful-paint')?.startTime"
LARGEST = """new Promise((told) => new PerformanceObserver((list) => told(list.getEntries().at(-1).startTime))
    .observe({ type: 'largest-contentful-paint', buffered: true }))"""
DRAWN = "new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Paints:
    """Milliseconds from the beginning of each load."""

    first: Sequence[float]
    """Until something of the page was painted (first contentful paint)."""
    whole: Sequence[float]
    """Until the largest text or picture was painted, when all was there."""
    again: Sequence[float]
    """As `first`, when the same page was loaded again."""


def paints(browser: Browser, url: str, words: str, loads: int = LOADS) -> Paints:
    """Load a page some times. words: all is there when it has them. The first load is not counted: it warms up the browser."""
    first, whole, again = list[float](), list[float](), list[float]()
    for _ in range(loads + 1):
        with browser.page(Look()) as page:
            first.append(_loaded(page, url, words))
            page.evaluate(DRAWN)
            whole.append(page.evaluate(LARGEST))
            page.open("about:blank")
            page.until("location.href === 'about:blank'")
            again.append(_loaded(page, url, words))
    return Paints(first=first[1:], whole=whole[1:], again=again[1:])


def _loaded(page: Page, url: str, words: str) -> float:
    page.open(url)
    painted_ms: float = page.until(f"document.body.innerText.includes({words!r}) && {FIRST}")
    return painted_ms
