"""Options that had another name: the former one works on, and neither --help nor completion names it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator


def also_called(parser: argparse._ActionsContainer, option: str, former: str) -> None:
    """Let `former` be another name of `option`, which is an argument of the parser, or of a group of it, already."""
    parser._option_string_actions[former] = parser._option_string_actions[option]


def former_names(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Yield the options of a parser that have a former name, and that name."""
    for name, action in parser._option_string_actions.items():
        if name not in action.option_strings:
            yield action.option_strings[-1], name
