"""One name for one thing in all commands: the rules that options of every parser keep, and the examples of every --help."""

from __future__ import annotations

import argparse
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli.command_families import FAMILIES
from headrace.cli.endpoint import DEFAULT_ENDPOINT, ENDPOINT
from headrace.cli.former_names import former_names
from headrace.cli.main import COMMANDS, _parser

ROOT = Path(__file__).parents[3]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "reorder_service/headrace/reorder_service/page/static").glob("*.js")),
    *sorted(path for path in (ROOT / "deploy").rglob("*") if path.suffix in (".yaml", ".sbatch", ".sh")),
    ROOT / "compose.yaml",
]
WITHOUT_FORMAT = {
    "reorder": "a service",
    "preprocessor": "a service",
    "scale": "a line for each decision, as in a log",
    "health": "one word",
    "tokens": "names of files",
    "certs": "names of files",
    "export": "names of folders",
}
LINE = 54  # characters beside a command's name, in 80 columns
UNGROUPED = 8  # options that a person takes in without an order
DIFFERENT = {
    "--out": {"DIR", "FILE"},
    "--format": {"table|json", "table|json|jsonl"},
    "--tokens": {"DIR", "N", "N,..."},  # of a cluster; of samples
    "--nodes": {"FILE.yaml", "N"},  # who they are; how many
    "--model": {"DIR", "NAME", "sizes"},
    "--device": {"NAME", "auto|cpu|cuda"},  # as they are sold; of this machine
    "--dp": {"UNIT=N,...", "UNIT=N:N,..."},
    "--tp": {"N,...", "UNIT=N,...", "UNIT=N:N,..."},
}
"""Options whose values differ between commands, with all that they take."""
FORMER = {
    "--batch": "--global-batch",
    "--format": "--as",  # of `headrace export`, whose output is no table
    "--reorder": "--endpoint",
    "--rounds": "--repeats",
}

Levels = dict[str, argparse.ArgumentParser]


def _walk(parser: argparse.ArgumentParser, path: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield path, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from _walk(below, f"{path} {name}".strip())


@pytest.fixture(scope="module")
def levels() -> Levels:
    return dict(_walk(_parser(COMMANDS)))


def _options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    hidden = argparse.SUPPRESS
    return [option for option in parser._actions if option.option_strings and option.dest != "help" and option.help != hidden]


def _takes(option: argparse.Action) -> str:
    choices = "|".join(map(str, option.choices or ()))
    return "sizes" if choices.startswith("tiny|") else choices or str(option.metavar)


def test_every_option_has_one_long_name_its_help_and_the_name_of_its_value(levels: Levels) -> None:
    for path, parser in levels.items():
        for option in _options(parser):
            assert len(option.option_strings) == 1, (path, option.option_strings)
            assert re.fullmatch(r"--[a-z][a-z0-9]*(-[a-z0-9]+)*", option.option_strings[0]), (path, option.option_strings)
            assert option.help, (path, option.option_strings)
            assert option.nargs == 0 or option.metavar or option.choices, (path, option.option_strings)


def test_an_option_takes_the_same_in_all_commands(levels: Levels) -> None:
    values: dict[str, set[str]] = defaultdict(set)
    for parser in levels.values():
        for option in _options(parser):
            values[option.option_strings[0]].add(_takes(option) if option.nargs != 0 else "nothing")
    assert {name: taken for name, taken in values.items() if len(taken) > 1} == DIFFERENT


def test_whoever_prints_a_table_prints_json_too(levels: Levels) -> None:
    commands = {path: parser for path, parser in levels.items() if path and not parser._subparsers}
    without = set()
    for path, parser in commands.items():
        (option,) = [one for one in _options(parser) if one.option_strings == ["--format"]] or [None]
        if option is None:
            without.add(path)
        else:
            assert list(option.choices or ())[:2] == ["table", "json"], path
            assert option.default == "table", path
    assert without == WITHOUT_FORMAT.keys()


def test_former_names_work_and_are_nowhere_advertised(levels: Levels) -> None:
    found = {(former, name) for parser in levels.values() for name, former in former_names(parser)}
    assert found == set(FORMER.items())
    for path, parser in levels.items():
        shown = parser.format_help()
        for name, former in former_names(parser):
            assert not re.search(rf"{former}\b(?!-)", shown), (path, former)
            assert parser._option_string_actions[former] is parser._option_string_actions[name]


def test_whoever_connects_takes_the_endpoint_by_the_same_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT, "10.0.0.1:7070,10.0.0.2:7070")
    connecting = set()
    for path, parser in _walk(_parser(COMMANDS)):
        option = parser._option_string_actions.get("--endpoint")
        if option is None:
            assert "--reorder" not in parser._option_string_actions
            continue
        connecting.add(path.split()[0])
        assert option is parser._option_string_actions["--reorder"], path
        assert option.default == "10.0.0.1:7070,10.0.0.2:7070", path
        assert f"${ENDPOINT}" in str(option.help), path
    assert connecting == {"preprocessor", "train", "job", "top", "scale", "audit", "replay", "health", "doctor"}
    monkeypatch.delenv(ENDPOINT)
    parser = _parser({"preprocessor", "health"})
    assert parser.parse_args(["preprocessor"]).endpoint == DEFAULT_ENDPOINT
    assert parser.parse_args(["preprocessor", "--reorder", "a:1"]).endpoint == "a:1"
    assert parser.parse_args(["health"]).endpoint == DEFAULT_ENDPOINT
    assert parser.parse_args(["health", "b:2"]).endpoint == parser.parse_args(["health", "--endpoint", "b:2"]).endpoint == "b:2"


def test_every_command_is_in_the_help_with_one_line(levels: Levels) -> None:
    shown = " ".join(levels[""].format_help().split())
    for name, (_, line) in COMMANDS.items():
        assert f" {name} {line}" in shown
        assert len(line) <= LINE, f"the line of {name} is two in a terminal of 80 columns"


def test_every_command_is_in_one_family_and_the_help_shows_it_there(levels: Levels) -> None:
    assert len(COMMANDS) == sum(map(len, FAMILIES.values()))
    shown = levels[""].format_help().partition("\ncommands:\n")[2]
    found = re.findall(r"^  (\w[\w ]*):$|^    ([a-z-]+) ", shown, re.MULTILINE)
    assert found == [entry for family in FAMILIES for entry in [(family, ""), *(("", name) for name in FAMILIES[family])]]


def test_what_takes_many_options_has_them_in_groups(levels: Levels) -> None:
    for path, parser in levels.items():
        loose = [option for option in parser._optionals._group_actions if option in _options(parser)]
        assert len(loose) <= UNGROUPED, f"headrace {path}: give the {len(loose)} options that are in no argument group one"


def test_the_examples_of_every_help_are_commands_that_are_taken(levels: Levels) -> None:
    for path, parser in levels.items():
        if not path:
            continue
        examples = re.findall(r"^  (?:torchrun [^\n]*? )?headrace (\S[^\n|>]*)", str(parser.epilog), re.MULTILINE)
        assert any(example.startswith(path) for example in examples), f"headrace {path} --help has no example of it"
        for example in examples:
            words = shlex.split(re.split(r"  +|#", example)[0])
            assert levels[""].parse_args(words).command == words[0]
            assert not _former_words(levels, words), example


def test_pages_and_manifests_name_options_as_they_are_called_now(levels: Levels) -> None:
    found = []
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
            for command in re.findall(r"(?<![\w./-])headrace ([a-z-]+ [^`|;&#]*)", line):
                words = command.split()
                if words[0] in COMMANDS:
                    found += [f"{page.relative_to(ROOT)}: {former}" for former in _former_words(levels, words)]
        if "--reorder" in page.read_text(encoding="utf-8") and page.name != "command-line.md":
            found.append(f"{page.relative_to(ROOT)}: --reorder")
    assert found == []


def _former_words(levels: Levels, words: list[str]) -> list[str]:
    """Return the former names among the words of a command."""
    two = " ".join(words[:2])
    parser = levels.get(two) or levels[words[0]]
    former = {name for _, name in former_names(parser)}
    return [word for word in words if word.partition("=")[0] in former]
