"""Names of headings, which links lead to: those that code hosts give them, in the site too. And Markdown outside of code."""

from __future__ import annotations

import re
from collections.abc import Callable

CODE = re.compile(
    r"^ *(?P<fence>`{3,})[^`\n]*\n(?s:.*?)^ *(?P=fence)`* *$|(?<!`)(?P<ticks>`+)(?!`)(?:.|\n(?!\s*\n))+?(?<!`)(?P=ticks)(?!`)",
    re.MULTILINE,
)
"""Fenced code, or code in a line."""
_HEADING = re.compile(r"^#+ (.*?)(?: \{#(\S+)\})?$", re.MULTILINE)
_FENCED = re.compile(r"^ *(?P<fence>`{3,})[^`\n]*\n(?s:.*?)^ *(?P=fence)`* *$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Return Markdown with `change` applied to what is no code."""
    parts: list[str] = []
    at = 0
    for code in CODE.finditer(text):
        parts += [change(text[at : code.start()]), code.group()]
        at = code.end()
    return "".join([*parts, change(text[at:])])


def slug(text: str, separator: str = "-") -> str:
    """Return the name that a heading gets. The signature is the one that Python-Markdown's table of contents calls."""
    return re.sub(r"[^\w\- ]", "", text).strip().lower().replace(" ", separator)


def title(markdown: str) -> str:
    """Return the first heading of a page, without the forms of its words. Raises ValueError for a page without a heading."""
    found = _HEADING.search(_FENCED.sub("", markdown))
    if found is None:
        raise ValueError("the page has no heading")
    return _LINK.sub(r"\1", found.group(1)).replace("`", "")


def anchors(markdown: str) -> set[str]:
    """Return the names of a page's headings: their own (`{#name}`), or those made of their words."""
    headings = _HEADING.findall(_FENCED.sub("", markdown))
    return {own or slug(_LINK.sub(r"\1", words)) for words, own in headings}
