"""How --help lays out its text: descriptions are filled, examples and tables stay as they are, commands come in families."""

from __future__ import annotations

import argparse
from typing import TypedDict

from headrace.cli.command_families import FAMILIES


class InFamilies(argparse._SubParsersAction):  # type: ignore[type-arg]  # generic in the stubs alone
    """All commands, which --help shows under the names of their families."""


class HelpFormatter(argparse.HelpFormatter):
    """Fills a text that is one line, leaves a text of several lines alone, and shows commands in their families."""

    def _format_action(self, action: argparse.Action) -> str:
        if not isinstance(action, InFamilies):
            return super()._format_action(action)
        of_name = {choice.dest: choice for choice in action._choices_actions}
        parts = []
        for family, names in FAMILIES.items():
            parts.append(f"{'':{self._current_indent}}{family}:\n")
            self._indent()
            parts += [self._format_action(of_name[name]) for name in names] + ["\n"]
            self._dedent()
        return "".join(parts).rstrip("\n") + "\n"

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
