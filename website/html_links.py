"""Links of a built site: each leads to a page, and on it to a place, that there is, and nothing is loaded from another host."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

_LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
_NOT_LOADED = {"canonical", "next", "prev", "edit"}
"""Relations of a `link` that a browser does not follow by itself."""


class Findings(NamedTuple):
    """What was found in a site."""

    num_pages: int
    num_links: int
    """Links within the site."""
    faults: list[str]
    """A sentence for each fault."""


def check(site: Path) -> Findings:
    """Return what is found in the HTML below a folder."""
    site = site.resolve()
    pages = {page: _Page.of(page) for page in sorted(site.rglob("*.html"))}
    num_links = 0
    faults: list[str] = []
    for page, read in pages.items():
        name = page.relative_to(site)
        faults += [f"{name} loads {url}" for url in read.loaded if urlsplit(url).netloc]
        for url in (*read.links, *read.loaded):
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            num_links += 1
            path = unquote(parts.path)
            target = (site / path.lstrip("/") if path.startswith("/") else page.parent / path).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or not target.is_relative_to(site):
                faults.append(f"{name} links to {url}, which there is not")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].names:
                faults.append(f"{name} links to {url}, a page without such a place")
    return Findings(len(pages), num_links, faults)


class _Page(HTMLParser):
    """What one page links to, loads and names."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.names: set[str] = set()

    @classmethod
    def of(cls, path: Path) -> _Page:
        page = cls()
        page.feed(path.read_text(encoding="utf-8"))
        page.close()
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.names |= {name for name in (values.get("id"), values.get("name")) if name}
        if tag == "a" and (url := values.get("href")):
            self.links.append(url)
        if (url := values.get(_LOADED.get(tag, ""))) and not set((values.get("rel") or "").split()) & _NOT_LOADED:
            self.loaded.append(url)
