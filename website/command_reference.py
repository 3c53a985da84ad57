"""The reference of commands: every command of `headrace` with its options, as argparse knows them."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headrace.cli.command_families import FAMILIES
from headrace.cli.main import every_command
from website.prose import definition, escaped

_INTRODUCTION = """# Commands

Every command of this release with all its options, as `headrace COMMAND --help` prints them. Exit codes, ports, variables of the
environment and completion are on [a page of their own](../command-line.md).

"""
_USUAL = ("positional arguments", "options")


class Command(NamedTuple):
    """A command, or an action of one."""

    name: str
    """`headrace job submit`."""
    line: str
    """What it does, in a line."""
    parser: argparse.ArgumentParser
    below: Sequence[Command]


@functools.cache
def commands() -> Sequence[Command]:
    """Return all commands, in the order of `headrace --help`."""
    return _below("headrace", every_command())


def flat(commands: Sequence[Command]) -> Iterator[Command]:
    """Yield commands, each before its actions."""
    for command in commands:
        yield command
        yield from flat(command.below)


def arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return what a command takes, without `--help` and what it keeps to itself."""
    return [one for group in parser._action_groups for one in _taken(group)]


def page() -> str:
    """Return the page."""
    top = commands()
    of_name = {_anchor(one): one for one in top}
    tables = [_table(family, [of_name[name] for name in names]) for family, names in FAMILIES.items()]
    return "".join([_INTRODUCTION, *tables, *map(_section, flat(top))])


def _table(family: str, commands: Sequence[Command]) -> str:
    rows = "".join(f"| [`{one.name}`](#{_anchor(one)}) | {escaped(one.line)} |\n" for one in commands)
    return f"| {family} | |\n|---|---|\n{rows}\n"


def _taken(group: argparse._ArgumentGroup) -> list[argparse.Action]:
    kinds = (argparse._HelpAction, argparse._SubParsersAction)
    return [one for one in group._group_actions if not isinstance(one, kinds) and one.help is not argparse.SUPPRESS]


def _below(name: str, parser: argparse.ArgumentParser) -> Sequence[Command]:
    found: list[Command] = []
    for group in parser._actions:
        if isinstance(group, argparse._SubParsersAction):
            lines = {choice.dest: choice.help or "" for choice in group._choices_actions}
            found += [
                Command(f"{name} {one}", lines.get(one, ""), below, _below(f"{name} {one}", below))
                for one, below in group.choices.items()
            ]
    return found


def _anchor(command: Command) -> str:
    return command.name.removeprefix("headrace ").replace(" ", "-")


def _section(command: Command) -> str:
    parser = command.parser
    level = "#" * len(command.name.split())
    described = parser.description or command.line[0].upper() + command.line[1:] + "."
    parts = [f"{level} `{command.name}` {{#{_anchor(command)}}}\n\n{escaped(described)}\n\n"]
    parts.append(f"    {_synopsis(command)}\n\n")
    for group in parser._action_groups:
        if taken := _taken(group):
            if group.title and group.title not in _USUAL:
                parts.append(f"**{escaped(_capital(group.title))}**\n\n")
            parts += [definition(f"`{_head(one)}`", escaped(_help(parser, one))) for one in taken if one.help]
    if parser.epilog:
        parts.append(_epilog(parser))
    return "".join(parts)


def _synopsis(command: Command) -> str:
    if command.below:
        return f"{command.name} {' | '.join(one.name.split()[-1] for one in command.below)}"
    taken = arguments(command.parser)
    options = [one for one in taken if one.option_strings]
    needed = [f"{one.option_strings[-1]} {_value(one)}" for one in options if one.required]
    rest = ["[options]"] if len(options) > len(needed) else []
    return " ".join([command.name, *needed, *rest, *(_value(one) for one in taken if not one.option_strings)])


def _head(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings)
    return f"{names} {_value(action)}".strip() if names else _value(action)


def _value(action: argparse.Action) -> str:
    """Return how the value of an argument is written; empty where there is none."""
    if action.nargs == 0:
        return ""
    names = action.metavar
    if names is None:
        chosen = "{" + ",".join(map(str, action.choices)) + "}" if action.choices is not None else None
        names = chosen or (action.dest.upper() if action.option_strings else action.dest)
    if isinstance(names, tuple):
        return " ".join(names)
    return {"?": f"[{names}]", "*": f"[{names} ...]", "+": f"{names} [{names} ...]"}.get(str(action.nargs), names)


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return argparse.HelpFormatter(parser.prog)._expand_help(action)


def _epilog(parser: argparse.ArgumentParser) -> str:
    text = (parser.epilog or "").replace("%(prog)s", parser.prog).strip("\n")
    return f"```text\n{text}\n```\n\n" if "\n" in text else f"{escaped(_capital(text))}\n\n"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
