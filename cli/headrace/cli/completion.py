"""Completion of `headrace` commands in a shell: scripts that are generated from the parser, for bash, zsh and fish."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from typing import NamedTuple

SHELLS = ("bash", "zsh", "fish")
_ZSH = """(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
autoload -Uz bashcompinit && bashcompinit
"""
_BASH = """_headrace() {{
    local word at="" words="" before="${{COMP_WORDS[COMP_CWORD-1]}}"
    for word in "${{COMP_WORDS[@]:1:$((COMP_CWORD-1))}}"; do
        case "$at/$word" in {commands}) at="$at/$word" ;; esac
    done
    case "$at $before" in
{values}
    *) case "$at" in
{words}
        esac ;;
    esac
    COMPREPLY=( $(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}") )
}}
complete -o default -F _headrace headrace
"""


class _Level(NamedTuple):
    path: tuple[str, ...]
    below: dict[str, str]
    """Command below this one -> its line of help."""
    options: list[argparse.Action]


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script for `bash`, `zsh` or `fish` that completes commands, options and choices of `parser`, and else files."""
    levels = list(_levels(parser))
    return "\n".join(_fish(levels)) + "\n" if shell == "fish" else _ZSH * (shell == "zsh") + _bash(levels)


def _levels(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[_Level]:
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    lines = {choice.dest: choice.help or "" for group in groups for choice in group._choices_actions}
    yield _Level(path, lines, [action for action in parser._actions if action.option_strings])
    for group in groups:
        for name, below in group.choices.items():
            yield from _levels(below, (*path, name))


def _bash(levels: Sequence[_Level]) -> str:
    values, words = [], []
    for path, below, options in levels:
        at = "".join(f"/{name}" for name in path)
        for option in options:
            if option.nargs != 0:  # its value comes next
                names = "|".join(f'"{at} {name}"' for name in option.option_strings)
                values.append(f'    {names}) words="{" ".join(map(str, option.choices or ()))}" ;;')
        here = [*below, *(name for option in options for name in option.option_strings)]
        words.append(f'        "{at}") words="{" ".join(here)}" ;;')
    commands = "|".join("".join(f"/{name}" for name in level.path) for level in levels if level.path)
    return _BASH.format(commands=commands, values="\n".join(values), words="\n".join(words))


def _fish(levels: Sequence[_Level]) -> Iterator[str]:
    for path, below, options in levels:
        seen = [f"__fish_seen_subcommand_from {name}" for name in path]
        here = shlex.quote("; and ".join([*seen, *([f"not __fish_seen_subcommand_from {' '.join(below)}"] if below else [])]))
        yield from (f"complete -c headrace -f -n {here} -a {name} -d {shlex.quote(line)}" for name, line in below.items())
        for option in options:
            names = " ".join(f"-{'l' if name.startswith('--') else 's'} {name.lstrip('-')}" for name in option.option_strings)
            value = "" if option.nargs == 0 else " -r"
            if option.choices:
                value = f" -x -a {shlex.quote(' '.join(map(str, option.choices)))}"
            yield f"complete -c headrace -n {here} {names}{value}"
