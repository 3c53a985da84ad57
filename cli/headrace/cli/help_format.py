"""How --help lays out its text: paragraphs of a description are filled, lines of examples and tables stay as they are."""

from __future__ import annotations

import argparse
from typing import TypedDict


class HelpFormatter(argparse.HelpFormatter):
    """Fills a text that is one line, and leaves a text of several lines alone."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text.strip():
            return "".join(indent + line for line in text.splitlines(keepends=True))
        return super()._fill_text(text, width, indent)


class Described(TypedDict):
    """What a command is, as `add_parser` takes it."""

    help: str  # one line in the list of commands
    description: str  # with which its own help begins


def described(line: str) -> Described:
    """Return a command's one line, and the same as a sentence."""
    return {"help": line, "description": f"{line[0].upper()}{line[1:]}."}
