"""Plain text of help and docstrings as Markdown: what is in backticks stays, what would be markup elsewhere is escaped."""

from __future__ import annotations

import re

from website.headings import outside_code

_MARKUP = re.compile(r"(?<!\w)[*_]|[*_](?!\w)|[<>\[\]#|{}\\]")
_ENTITIES = {"<": "&lt;", ">": "&gt;"}
_INDENT = "    "


def escaped(text: str) -> str:
    """Return text of one paragraph or more in which only backticks mean something."""
    return outside_code(text, lambda plain: _MARKUP.sub(_escape, plain))


def _escape(markup: re.Match[str]) -> str:
    return _ENTITIES.get(markup.group(), f"\\{markup.group()}")


def paragraphs(docstring: str) -> str:
    """Return a dedented docstring as Markdown. Lines that are further in are code."""
    blocks = re.split(r"\n\s*\n", docstring.strip("\n"))
    return "\n\n".join(block if block.startswith(_INDENT) else escaped(block) for block in blocks)


def definition(term: str, text: str) -> str:
    """Return a term and what it means, as an item of a definition list."""
    lines = (f"{_INDENT}{line}" if line else "" for line in text.strip().split("\n"))
    return f"{term}\n:" + "\n".join(lines)[1:] + "\n\n"
