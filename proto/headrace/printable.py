"""Escaping of text from data sets, which may hold terminal control sequences or lone surrogates."""

from __future__ import annotations

import unicodedata


def printable(text: str, *, keep: str = "") -> str:
    r"""Return the text with unprintable characters escaped: `\x1b[2J` then clears no terminal, and `\n` begins no line.

    Lone surrogates (`\ud800`), which cannot be sent, are escaped too. `keep`: characters that are never escaped.
    """
    if text.isprintable():
        return text
    return "".join(c if _is_seen(c) or c in keep else c.encode("unicode_escape").decode() for c in text)


def sendable(text: str) -> str:
    """Return the text with lone surrogates escaped: neither messages nor the store can hold them."""
    return text.encode("utf-8", "backslashreplace").decode() if not text.isascii() else text


def _is_seen(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"
