"""Text from data sets, as it may be shown: a name or a field may hold what a terminal obeys, or what is no character at all."""

from __future__ import annotations

import unicodedata


def printable(text: str, *, keep: str = "") -> str:
    r"""The text with all that is not to be seen written as escapes: `\x1b[2J` does not clear a terminal, `\n` begins no line.

    So are lone surrogates (`\ud800`), which cannot be sent. `keep`: characters that may stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(c if _is_seen(c) or c in keep else c.encode("unicode_escape").decode() for c in text)


def sendable(text: str) -> str:
    """The text with lone surrogates, which no message and no store takes, written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode() if not text.isascii() else text


def _is_seen(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"
